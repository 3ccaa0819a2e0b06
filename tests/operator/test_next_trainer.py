"""The next trainer: it is not taken for the last one, whose words stand until it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator.observed import WantedRollout
from kitestring_operator.trainer_client import TrainerSilentError
from tests.operator.documents import NAMESPACE, pool, run, storage_secret
from tests.operator.world import World, report


async def running(isolation: str = "Worker") -> World:
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool(isolation=isolation))
    world.cluster.put(run())
    await world.settle()
    world.trainers.says = report(step=2)
    await world.settle()
    assert world.status()["phase"] == "Running"
    return world


async def look(world: World, *, may_write: bool = True) -> None:
    """Look at the run once, at what Kubernetes has told so far; no trainer is asked."""
    world.deliver()
    (found,) = world.cache.of_kind(names.KIND_TRAINING_RUN)
    memory = world.controller.memory_of((NAMESPACE, found["metadata"]["name"]), found["metadata"]["uid"])
    memory.status_written_at = None if may_write else asyncio.get_running_loop().time()
    await world.look(found)


def suspend(world: World, *, suspended: bool) -> None:
    world.cluster.change(names.KIND_TRAINING_RUN, "calculator", {"spec": {"suspend": suspended}})


async def test_the_words_of_a_lost_trainer_are_not_the_next_ones() -> None:
    world = await running()
    world.cluster.end_job("calculator-trainer-1", code=143)
    seen = []
    for _ in range(4):
        await look(world)
        seen.append(world.status()["phase"])
    assert "calculator-trainer-2" in world.there("Job")
    assert seen == ["Restarting"] * 4
    world.trainers.says = report("Starting", step=0)
    await world.settle()
    assert world.status()["phase"] == "Restarting"
    world.trainers.says = report(step=2)
    await world.settle()
    assert world.status()["phase"] == "Running"


async def test_the_next_trainer_is_made_once_the_status_says_that_the_last_one_was_lost() -> None:
    """Else whoever looks next, and has asked no trainer yet, takes the run for one that goes on."""
    world = await running()
    world.cluster.end_job("calculator-trainer-1", code=143)
    await look(world, may_write=False)
    assert (world.status()["phase"], world.there("Job")) == ("Running", {"calculator-trainer-1"})
    after = World(cluster=world.cluster)
    await after.controller.resync()
    for _ in range(3):
        await look(after)
        assert after.status()["phase"] == "Restarting"
    assert "calculator-trainer-2" in world.there("Job")


async def test_a_resumed_run_starts() -> None:
    world = await running()
    suspend(world, suspended=True)
    await world.settle()
    suspend(world, suspended=False)
    for _ in range(3):
        await look(world)
        assert world.status()["phase"] == "Starting"
    assert world.there("Job") == {"calculator-trainer-1"}


async def test_the_last_words_of_a_stopped_trainer_are_written_down() -> None:
    world = await running()
    world.trainers.says = report(step=3)
    await world.ask()
    suspend(world, suspended=True)
    await look(world, may_write=False)
    assert (world.there("Job"), world.status()["step"]) == (set(), 1), "too early to write it"
    await look(world)
    assert (world.status()["phase"], world.status()["step"]) == ("Suspending", 2)


async def test_the_last_words_count_before_those_of_an_older_trainer_that_is_kept() -> None:
    world = await running()
    world.cluster.end_job("calculator-trainer-1", code=143)
    await world.settle()
    assert world.there("Job") == {"calculator-trainer-1", "calculator-trainer-2"}
    world.trainers.says = report(step=3)
    await world.ask()
    suspend(world, suspended=True)
    await look(world, may_write=False)
    assert world.there("Job") == {"calculator-trainer-1"}
    await look(world)
    assert (world.status()["phase"], world.status()["step"]) == ("Suspending", 2)


async def test_no_older_words_are_those_of_a_trainer_whose_number_was_given_before() -> None:
    """The first one's node was lost, the second was deleted when the run was suspended: numbers begin anew."""
    world = await running()
    lose_node(world, "calculator-trainer-1-0", ago=121)
    await world.settle()
    world.trainers.says = report(step=2)
    await world.settle()
    assert (world.status()["phase"], world.there("Job")) == ("Running", {"calculator-trainer-2"})
    suspend(world, suspended=True)
    await world.settle()
    suspend(world, suspended=False)
    for _ in range(4):
        await look(world)
        assert world.status()["phase"] == "Starting"
    assert world.there("Job") == {"calculator-trainer-1"}


async def test_no_rollout_is_started_for_a_trainer_that_is_gone() -> None:
    world = await running("Job")
    world.trainers.wants = (WantedRollout("t000001-00000000-000", 1, "secret"),)
    await world.ask()
    world.cluster.end_job("calculator-trainer-1", code=143)
    for _ in range(3):
        await look(world)
    assert world.there("Job") == {"calculator-trainer-1", "calculator-trainer-2"}
    await world.settle()
    assert len(world.there("Job")) == 3, "it asks for the rollout as well"


def lose_node(world: World, name: str, *, ago: float) -> None:
    """The pod's node died: its pod was evicted, its grace period ended so many seconds ago, and nobody ends it."""
    at = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat()
    status = {"conditions": [{"type": "Ready", "status": "False"}]}
    world.cluster.change("Pod", name, {"metadata": {"deletionTimestamp": at}, "status": status})


async def test_a_trainer_on_a_node_that_is_lost_for_good_is_started_elsewhere() -> None:
    world = await running()
    world.trainers.says = None
    lose_node(world, "calculator-trainer-1-0", ago=100)
    await look(world)
    assert (world.status()["phase"], world.there("Job")) == ("Running", {"calculator-trainer-1"})
    (found,) = world.cache.of_kind(names.KIND_TRAINING_RUN)
    wait = await world.look(found)
    assert wait is not None and 15 < wait <= 20, "no event will tell"
    lose_node(world, "calculator-trainer-1-0", ago=121)
    await look(world)
    assert world.status()["phase"] == "Restarting"
    assert "pod calculator-trainer-1-0 was deleted and has not ended since" in world.status()["message"]
    await world.settle()
    assert world.there("Job") == {"calculator-trainer-2"}, "the lost one is of no use to anybody"
    job = world.cluster.find("Job", "calculator-trainer-2")
    assert job is not None
    stamps = {key: value for key, value in job["metadata"]["annotations"].items() if key in STAMPS}
    assert stamps == {names.ANNOTATION_RESTARTS: "0", names.ANNOTATION_DISRUPTIONS: "1"}
    world.trainers.says = report(step=2)
    await world.settle()
    assert (world.status()["phase"], world.status()["restarts"]) == ("Running", 0)


STAMPS = {names.ANNOTATION_RESTARTS, names.ANNOTATION_DISRUPTIONS}


async def test_a_lost_trainer_that_is_being_deleted_keeps_no_other_from_its_start() -> None:
    """As with `kubectl delete job --cascade=foreground`, which waits for the pod that never ends."""
    world = await running()
    lose_node(world, "calculator-trainer-1-0", ago=121)
    deleted = {"metadata": {"deletionTimestamp": datetime.now(UTC).isoformat()}}
    world.cluster.change("Job", "calculator-trainer-1", deleted)
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")


async def test_what_changed_while_a_trainer_started_is_told_it_once_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers begin before it takes changes; see test_trainer_client for what it answers till then."""
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run())
    await world.settle()

    async def takes_none(url: str, credential: str, live: Mapping[str, Any]) -> None:
        raise TrainerSilentError("the trainer is starting; try again")

    world.trainers.says = report("Starting", step=0)
    with monkeypatch.context() as starting:
        starting.setattr(world.trainers, "change", takes_none)
        await world.settle()
        world.cluster.change(names.KIND_TRAINING_RUN, "calculator", {"spec": {"steps": 9}})
        await world.settle()
    assert world.trainers.told_live == []
    world.trainers.says = report()
    await world.settle()
    assert [live["steps"] for live in world.trainers.told_live] == [9]
    assert [event for event in world.cluster.of_kind("Event") if event["type"] == "Warning"] == []


async def test_the_clock_of_a_node_delays_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    world = await running()
    world.cluster.end_job("calculator-trainer-1", code=1)
    ahead = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    state = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": ahead}}
    status = {"containerStatuses": [{"name": "trainer", "state": state}]}
    world.cluster.change("Pod", "calculator-trainer-1-0", {"status": status})
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")
