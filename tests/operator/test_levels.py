"""Events may be lost, doubled, late or in any order, and the operator may be another one at any moment."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kitestring_api.v1alpha1.status import Phase
from kitestring_operator import lifecycle
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.observed import ObjectRef
from tests.operator.documents import NAMESPACE, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.world import World, report

RUN = "calculator"

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("suspend"), st.booleans()),
        st.tuples(st.just("end"), st.sampled_from([0, 1, 3, 137, 143])),
        st.tuples(st.just("evict"), st.just(0)),
        st.tuples(st.just("scale"), st.integers(0, 3)),
        st.tuples(st.just("steps"), st.integers(1, 5)),
        st.tuples(
            st.just("lose"), st.sampled_from(["Service", "StatefulSet", "Deployment", "ConfigMap", "Job", "Secret"])
        ),
        st.tuples(st.just("speak"), st.sampled_from([None, "Starting", "RollingOut"])),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=8,
)


def trainers_at_work(cluster: FakeCluster) -> list[str]:
    return [
        job["metadata"]["name"]
        for job in cluster.of_kind("Job")
        if not any(entry["status"] == "True" for entry in job.get("status", {}).get("conditions", ()))
    ]


def operate(world: World, operation: str, value: object) -> None:
    cluster = world.cluster
    working = trainers_at_work(cluster)
    match operation:
        case "suspend":
            cluster.change("TrainingRun", RUN, {"spec": {"suspend": value}})
        case "end" if working:
            cluster.make_pods()
            cluster.end_job(working[0], code=value)  # type: ignore[arg-type]
        case "evict" if working:
            cluster.make_pods()
            cluster.end_job(working[0], code=137, disrupted=True)
        case "scale":
            cluster.change("RolloutPool", "calc", {"spec": {"replicas": value}})
        case "steps":
            cluster.change("TrainingRun", RUN, {"spec": {"steps": value}})
        case "lose":
            for item in cluster.of_kind(str(value)):
                if item["metadata"]["name"].startswith(RUN) and "trainer-" not in item["metadata"]["name"]:
                    cluster.remove(ObjectRef.of(item))
                    break
        case "speak":
            world.trainers.says = None if value is None else report(str(value))


async def deliver_badly(world: World, chance: random.Random) -> None:
    """Lose some events, double some, mix them all."""
    told, world.cluster.told = world.cluster.told, []
    heard = [event for event in told if chance.random() < 0.7]
    heard += [event for event in told if chance.random() < 0.2]
    chance.shuffle(heard)
    for event, manifest in heard:
        world.controller.observe(manifest, event)  # type: ignore[arg-type]
    for kind in ("TrainingRun", "RolloutPool"):
        for item in list(world.cache.of_kind(kind)):
            if chance.random() < 0.8:
                await world.look(item)
    assert len(trainers_at_work(world.cluster)) <= 1, "two trainers of one run"


async def history(operations: list[tuple[str, object]], seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    cluster = world.cluster
    cluster.put(storage_secret())
    cluster.put(pool())
    cluster.put(run(failurePolicy={"maxRestarts": 2}))
    counted = 0
    for operation, value in operations:
        await deliver_badly(world, chance)
        if operation == "restart":
            said, world = world.trainers.says, World(cluster=cluster)
            world.trainers.says = said
            await world.controller.resync()
            continue
        counted += operation == "end" and value in (1, 137) and bool(trainers_at_work(cluster))
        operate(world, operation, value)
    world.trainers.says = world.trainers.says or report()
    await deliver_badly(world, chance)
    await world.controller.resync()
    await world.settle()
    await world.controller.resync()
    await world.settle()

    status = world.status(RUN)
    phase = Phase(status["phase"])
    asked = cluster.objects[KINDS["TrainingRun"].ref(NAMESPACE, RUN)]["spec"]
    pods = [pod for pod in cluster.of_kind("Pod") if pod["status"]["phase"] == "Running"]
    assert status.get("restarts", 0) <= counted
    if phase.is_final or phase is Phase.SUSPENDED:
        assert not trainers_at_work(cluster) and not pods
        assert not world.there("StatefulSet") and not world.there("Deployment")
    else:
        assert len(trainers_at_work(cluster)) == 1
        assert phase in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)
        workers = cluster.find("Deployment", f"{RUN}-rollout")
        chosen = cluster.objects[KINDS["RolloutPool"].ref(NAMESPACE, "calc")]
        assert workers is not None and workers["spec"]["replicas"] == chosen["spec"]["replicas"]
        assert world.there("Secret") == {"storage-keys", f"{RUN}-keys"}
    assert (phase is Phase.SUSPENDED) == (bool(asked.get("suspend")) and not phase.is_final)

    # an operator that remembers nothing finds nothing to do
    before = len(cluster.writes)
    fresh = World(cluster=cluster)
    fresh.trainers.says = world.trainers.says
    await fresh.controller.resync()
    await fresh.settle()
    assert cluster.writes[before:] == []


@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 2**16))
def test_the_end_is_the_same(operations: list[tuple[str, object]], seed: int) -> None:
    saved = lifecycle.FIRST_RESTART_SECONDS
    lifecycle.FIRST_RESTART_SECONDS = 0.0  # type: ignore[misc]
    try:
        asyncio.run(history(operations, seed))
    finally:
        lifecycle.FIRST_RESTART_SECONDS = saved  # type: ignore[misc]
