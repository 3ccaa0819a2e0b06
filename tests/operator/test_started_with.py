"""What a run keeps from its start: another run's checkpoint, and the place of its objects."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kitestring_api import names
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.settings import DefaultStorage, Settings, StorageKeys
from tests.operator.documents import NAMESPACE, SETTINGS, pool, run, storage_secret
from tests.operator.world import World, report

# --- A checkpoint of another run ----------------------------------------------------------------------------------

FIRST = "s3://runs/first-11111111/checkpoints/step-000010/"
LATER = "s3://runs/first-11111111/checkpoints/step-000020/"


async def from_a_checkpoint(**source: Any) -> World:
    """A run that started from the last checkpoint of run `first`, which another controller carries out."""
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run("first", managedBy="elsewhere.example/controller") | {"status": {"checkpoint": FIRST}})
    model = {"checkpointOf": {"trainingRun": "first", **source}}
    world.cluster.put(run(policies=[{"name": "policy", "model": model}]))
    await world.settle()
    assert prefix(world) == "first-11111111/checkpoints/step-000010"
    return world


def config(world: World, file: str) -> Any:
    found = world.cluster.find("ConfigMap", "calculator-config")
    assert found is not None
    return json.loads(found["data"][file])


def prefix(world: World) -> str:
    """Where the next trainer fetches its model from."""
    ((item,),) = (config(world, "fetch.json")["items"],)
    return str(item["s3"]["prefix"])


async def suspend(world: World, *, suspended: bool) -> None:
    world.cluster.change(names.KIND_TRAINING_RUN, "calculator", {"spec": {"suspend": suspended}})
    await world.settle()


async def test_all_trainers_begin_from_the_checkpoint_of_the_first() -> None:
    world = await from_a_checkpoint()
    world.cluster.change(names.KIND_TRAINING_RUN, "first", {"status": {"checkpoint": LATER}})
    world.cluster.end_job("calculator-trainer-1", code=143)
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")
    assert prefix(world) == "first-11111111/checkpoints/step-000010"
    await suspend(world, suspended=True)
    await suspend(world, suspended=False)
    assert world.status()["phase"] == "Starting"
    assert prefix(world) == "first-11111111/checkpoints/step-000010"


async def test_the_run_that_it_came_from_may_go() -> None:
    world = await from_a_checkpoint()
    world.cluster.remove(KINDS[names.KIND_TRAINING_RUN].ref(NAMESPACE, "first"))
    world.cluster.change(names.KIND_ROLLOUT_POOL, "calc", {"spec": {"replicas": 5}})
    world.cluster.end_job("calculator-trainer-1", code=143)
    await world.settle()
    workers = world.cluster.find("Deployment", "calculator-rollout")
    assert workers is not None and workers["spec"]["replicas"] == 5
    assert "calculator-trainer-2" in world.there("Job")
    await suspend(world, suspended=True)
    assert world.status()["phase"] == "Suspended"
    await suspend(world, suspended=False)
    assert (world.status()["phase"], prefix(world)) == ("Starting", "first-11111111/checkpoints/step-000010")


async def test_until_a_run_starts_the_last_checkpoint_counts() -> None:
    world = World()
    world.cluster.refuses["calculator-trainer-1"] = "a policy of the cluster forbids it"
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run("first", managedBy="elsewhere.example/controller") | {"status": {"checkpoint": FIRST}})
    world.cluster.put(run(policies=[{"name": "policy", "model": {"checkpointOf": {"trainingRun": "first"}}}]))
    await world.settle()
    assert prefix(world) == "first-11111111/checkpoints/step-000010"
    world.cluster.change(names.KIND_TRAINING_RUN, "first", {"status": {"checkpoint": LATER}})
    world.cluster.refuses.clear()
    await world.controller.resync()
    await world.settle()
    assert (world.status()["phase"], prefix(world)) == ("Starting", "first-11111111/checkpoints/step-000020")


async def test_a_step_that_is_named_stays() -> None:
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run("first", managedBy="elsewhere.example/controller") | {"status": {"checkpoint": FIRST}})
    model = {"checkpointOf": {"trainingRun": "first", "step": 5}}
    world.cluster.put(run(policies=[{"name": "policy", "model": model}]))
    await world.settle()
    world.cluster.end_job("calculator-trainer-1", code=143)
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")
    assert prefix(world) == "first-11111111/checkpoints/step-000005"


# --- The installation's storage -----------------------------------------------------------------------------------


def installation(key: str, **storage: Any) -> Settings:
    """Settings with a default storage, opened by this key."""
    given = {"bucket": "old", "endpoint": "http://seaweedfs:8333", "prefix": "team"} | storage
    default = DefaultStorage(**given, access_key_file=Path("id"), secret_key_file=Path("key"))
    keys = StorageKeys(access_key_id=SecretStr("id"), secret_access_key=SecretStr(key))
    return SETTINGS.model_copy(update={"default_storage": default, "storage_keys": keys})


async def stored(settings: Settings) -> World:
    """A run that works, with the installation's storage."""
    world = World(settings)
    world.cluster.put(pool())
    world.cluster.put(run(storage=None))
    await world.settle()
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"
    return world


async def upgraded(world: World, settings: Settings) -> World:
    """The same cluster after another operator has looked at it."""
    newer = World(settings, world.cluster)
    newer.trainers.says = world.trainers.says
    await newer.controller.resync()
    await newer.settle()
    return newer


def stores(world: World) -> dict[str, Any]:
    """Where each part has its objects."""
    parts = ("collector.json", "policy-sidecar.json", "trainer.json")
    return {part: config(world, part)["store"] for part in parts}


def walls(world: World) -> dict[str, Any]:
    return {item["metadata"]["name"]: item["spec"] for item in world.cluster.of_kind("NetworkPolicy")}


def key(world: World) -> str:
    secret = world.cluster.find("Secret", "calculator-storage")
    assert secret is not None
    return base64.b64decode(secret["data"]["secretAccessKey"]).decode()


@pytest.mark.parametrize(
    ("storage", "has_key"),
    [
        ({"bucket": "new", "endpoint": None, "region": "eu-central-1", "prefix": None}, "old"),
        ({"bucket": "new"}, "old"),
        # the same keys open both
        ({"prefix": "elsewhere"}, "new"),
        ({"region": "eu-central-1"}, "new"),
        ({}, "new"),
    ],
)
async def test_a_run_stays_where_it_began(storage: dict[str, Any], has_key: str) -> None:
    world = await stored(installation("old"))
    place, policies = stores(world), walls(world)
    assert place["trainer.json"]["prefix"].startswith("team/calculator-")
    newer = await upgraded(world, installation("new", **storage))
    assert (stores(newer), walls(newer), key(newer)) == (place, policies, has_key)
    await suspend(newer, suspended=True)
    await suspend(newer, suspended=False)
    assert (stores(newer), walls(newer), key(newer)) == (place, policies, has_key)


async def test_an_installation_without_storage_keeps_the_runs_that_began_in_it() -> None:
    world = await stored(installation("old"))
    place = stores(world)
    newer = await upgraded(world, SETTINGS)
    newer.cluster.end_job("calculator-trainer-1", code=143)
    await newer.settle()
    assert "calculator-trainer-2" in newer.there("Job")
    assert (stores(newer), key(newer)) == (place, "old")


async def test_the_same_place_in_other_words_is_the_same() -> None:
    world = await stored(installation("old"))
    before = len(world.cluster.writes)
    await upgraded(world, installation("old", endpoint="http://seaweedfs:8333/", prefix="team/"))
    assert [ref for verb, ref in world.cluster.writes[before:] if ref.kind == "ConfigMap"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"store": 1}', '{"store": {"secure": 1}}', '{"items": [1]}'])
async def test_configs_that_somebody_wrote_over_are_none(text: str) -> None:
    world = await stored(installation("old"))
    world.cluster.change("ConfigMap", "calculator-config", {"data": {"trainer.json": text, "fetch.json": text}})
    newer = await upgraded(world, installation("new", bucket="new"))
    newer.cluster.change(names.KIND_TRAINING_RUN, "calculator", {"spec": {"steps": 9}})
    await newer.settle()
    assert config(newer, "trainer.json")["store"]["bucket"] == "new"
