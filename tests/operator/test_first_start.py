"""How long a trainer waits for the first answer of storage: at a run's first start its address may be wrong."""

from __future__ import annotations

import json

import pytest

from tests.operator.documents import pool, run, storage_secret
from tests.operator.world import World, report


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    made = World()
    made.cluster.put(storage_secret())
    made.cluster.put(pool())
    made.cluster.put(run())
    return made


def patience(world: World) -> float:
    """Of the trainer that runs, as its config says it."""
    found = world.cluster.find("ConfigMap", "calculator-config")
    assert found is not None
    return float(json.loads(found["data"]["trainer.json"])["timing"]["first_answer"])


async def test_an_address_that_is_wrong_shows_after_a_minute(world: World) -> None:
    await world.settle()
    assert patience(world) == 60
    said = "object storage (spec.storage) has not answered once in 61 s: bucket b at nowhere: no such host"
    result = json.dumps({"phase": "Failed", "reason": "StorageUnavailable", "message": said, "exit_code": 1})
    world.cluster.end_job("calculator-trainer-1", code=1, message=result)
    await world.settle()
    status = world.status()
    assert (status["phase"], status["reason"], status["restarts"]) == ("Restarting", "StorageUnavailable", 1)
    assert status["message"] == f"the trainer is started again; what the last one said: {said}"
    assert status["lastError"].endswith(said)
    assert patience(world) == 900, "if it was an outage after all, the run is to outlast it"


async def test_a_run_that_has_made_a_step_waits_as_for_any_outage(world: World) -> None:
    await world.settle()
    world.trainers.says = report(step=2)
    await world.settle()
    assert patience(world) == 60, "the config of a trainer stays while it runs"
    world.cluster.end_job("calculator-trainer-1", code=143)
    world.trainers.says = None
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")
    assert patience(world) == 900
