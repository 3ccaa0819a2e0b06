"""Pods that the API server does not let be made: the status says which object lacks them, and why."""

from __future__ import annotations

import pytest

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.cluster.errors import ForbiddenError
from kitestring_operator.observed import Manifest, WantedRollout
from tests.operator.documents import NAMESPACE, pool, run, storage_secret
from tests.operator.world import World, report

LONG_AGO = {"metadata": {"creationTimestamp": "2026-03-01T12:00:00Z"}}
QUOTA = 'pods "x" is forbidden: exceeded quota: team, requested: cpu=4, used: cpu=0, limited: cpu=2'


async def world_without(*podless: str, **spec: object) -> World:
    world = World()
    world.cluster.podless |= set(podless)
    world.cluster.put(storage_secret())
    world.cluster.put(pool(**spec))
    world.cluster.put(run())
    await world.settle()
    return world


def refused(world: World, kind: str, name: str, message: str = QUOTA) -> None:
    """The API server has refused a pod of this object for a while."""
    lacks = {"active": None} if kind == "Job" else {"replicas": 0, "readyReplicas": 0}
    item = world.cluster.change(kind, name, LONG_AGO | {"status": lacks})
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{kind}", "namespace": NAMESPACE},
        "involvedObject": {"uid": item["metadata"]["uid"]},
        "type": "Warning",
        "reason": "FailedCreate",
        "message": message,
    }
    world.cluster.put(event)


def condition(world: World, kind: str) -> Manifest:
    return next(entry for entry in world.status()["conditions"] if entry["type"] == kind)


@pytest.mark.parametrize(
    ("kind", "name", "part"),
    [
        ("Job", "calculator-trainer-1", "TrainerReady"),
        ("StatefulSet", "calculator-policy", "InferenceReady"),
        ("StatefulSet", "calculator-gateway", "RolloutsReady"),
    ],
)
async def test_a_job_or_stateful_set_without_pods_says_why(kind: str, name: str, part: str) -> None:
    world = await world_without(name)
    assert world.status()["message"] == "parts are being started"
    refused(world, kind, name)
    await world.settle()
    said = f"{kind} {name} cannot have its pods: {QUOTA}"
    assert (world.status()["phase"], world.status()["message"]) == ("Starting", said)
    assert (condition(world, part)["status"], condition(world, part)["message"]) == ("False", said)
    reads = world.cluster.reads
    await world.settle()
    assert world.cluster.reads == reads, "asked once between two resyncs"
    world.cluster.podless.clear()
    status = {"active": 1} if kind == "Job" else {"replicas": 1}
    world.cluster.change(kind, name, {"status": status})
    await world.settle()
    assert world.status()["message"] == "parts are being started"


async def test_what_was_made_just_now_is_not_asked_about() -> None:
    world = await world_without("calculator-trainer-1")
    refused(world, "Job", "calculator-trainer-1")
    now = world.cluster.find("TrainingRun", "calculator")
    assert now is not None
    created = {"creationTimestamp": now["metadata"]["creationTimestamp"]}
    world.cluster.change("Job", "calculator-trainer-1", {"metadata": created})
    await world.settle()
    assert world.status()["message"] == "parts are being started"


async def test_a_deployment_says_it_itself() -> None:
    world = await world_without("calculator-rollout")
    said = 'pods "calculator-rollout-1-" is forbidden: error looking up service account team-a/agents: not found'
    conditions = [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": said}]
    world.cluster.change("Deployment", "calculator-rollout", {"status": {"conditions": conditions}})
    await world.controller.resync()
    await world.settle()
    assert world.status()["message"] == f"Deployment calculator-rollout cannot have its pods: {said}"
    assert said in condition(world, "RolloutsReady")["message"]
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"
    assert said in condition(world, "RolloutsReady")["message"]


async def test_where_events_cannot_be_read_it_is_said_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an operator whose rights are those of an older chart."""
    world = await world_without("calculator-trainer-1")

    async def forbidden(*_: object) -> str:
        raise ForbiddenError("list events of team-a", 403, "forbidden")

    monkeypatch.setattr(world.cluster, "latest_event", forbidden)
    refused(world, "Job", "calculator-trainer-1")
    await world.settle()
    assert world.status()["message"] == (
        "Job calculator-trainer-1 has 0 of 1 pods; kubectl describe -n team-a job calculator-trainer-1 says why"
    )


async def test_a_rollout_whose_pod_is_refused_shows_while_the_run_works() -> None:
    """Its Job would wait for its deadline, and nothing would say why."""
    job = identity.rollout_job_name("calculator", "a", 1)
    world = await world_without(job, isolation="Job")
    world.trainers.says, world.trainers.wants = report(), (WantedRollout("a", 1, "credential"),)
    await world.settle()
    refused(world, "Job", job)
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Running", names.REASON_RUNNING)
    ready = condition(world, "RolloutsReady")
    assert (ready["status"], ready["message"]) == ("False", f"Job {job} cannot have its pods: {QUOTA}")
