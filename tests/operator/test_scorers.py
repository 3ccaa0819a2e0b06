"""A run whose pool has a scorer of its own: it comes and goes with the run, and its troubles are in the status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kitestring_operator.queueing import within_admission
from tests.operator.documents import pool, run, storage_secret
from tests.operator.parts.rendering import context
from tests.operator.world import World, report

HIDDEN = "canary-1d5c"


def judged(**scorer: Any) -> dict[str, Any]:
    return pool(reward={"source": "scorer", "scorer": {"image": "judge:1", **scorer}})


@pytest.fixture
def world() -> World:
    made = World()
    made.cluster.put(storage_secret())
    return made


async def running(world: World, **scorer: Any) -> None:
    world.cluster.put(judged(**scorer))
    world.cluster.put(run())
    await world.settle()
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"


def ready(world: World) -> tuple[str, str, str]:
    found = next(entry for entry in world.status()["conditions"] if entry["type"] == "RolloutsReady")
    return found["status"], found["reason"], found["message"]


async def test_it_comes_with_the_run_and_goes_with_it(world: World) -> None:
    await running(world, replicas=2)
    assert "calculator-scorer" in world.there("Deployment") & world.there("Service") & world.there("NetworkPolicy")
    assert {"calculator-scorer-0", "calculator-scorer-1"} <= world.there("Pod")
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    world.deliver()
    made = world.cluster.find("TrainingRun", "calculator")
    assert made is not None
    await world.look(made)
    assert "calculator-scorer" in world.there("Deployment"), "what the trainer still asks is answered"
    await world.settle()
    assert world.status()["phase"] == "Suspended"
    assert world.there("Deployment") == world.there("Pod") == set()
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": False}})
    world.trainers.says = None
    await world.settle()
    assert "calculator-scorer" in world.there("Deployment")
    world.cluster.end_job("calculator-trainer-1", message=json.dumps({"phase": "Finished", "exit_code": 0}))
    await world.settle()
    assert world.status()["phase"] == "Succeeded"
    assert world.there("Deployment") == set()
    assert world.there("Pod") == {"calculator-trainer-1-0"}, "for its log"


async def test_its_size_changes_while_the_run_goes_on(world: World) -> None:
    await running(world)
    world.cluster.put(judged(replicas=3) | {"metadata": judged()["metadata"] | {"generation": 2}})
    await world.settle()
    found = world.cluster.find("Deployment", "calculator-scorer")
    assert found is not None and found["spec"]["replicas"] == 3
    assert world.there("Job") == {"calculator-trainer-1"}
    assert world.status()["restarts"] == 0


@pytest.mark.parametrize(
    ("state", "reason", "message"),
    [
        (
            {"state": {"waiting": {"reason": "ImagePullBackOff"}}},
            "ImagePull",
            "pod calculator-scorer-0 cannot pull image judge:1: ImagePullBackOff",
        ),
        (
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 3, "message": f"judging by {HIDDEN}"}},
            },
            "Starting",
            "container scorer of pod calculator-scorer-0 ends again and again, last with exit code 3; "
            "kubectl logs -n team-a calculator-scorer-0 -c scorer --previous says more",
        ),
    ],
)
async def test_what_keeps_it_from_serving_is_said(
    world: World, state: dict[str, Any], reason: str, message: str
) -> None:
    world.cluster.put(judged())
    world.cluster.put(run())
    await world.settle()
    container = {"name": "scorer", "image": "judge:1", **state}
    # what the kubelet says, and what the Deployment's controller makes of it
    stuck = {
        "phase": "Pending",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [container],
    }
    world.cluster.change("Pod", "calculator-scorer-0", {"status": stuck})
    world.cluster.make_pods = lambda: None  # type: ignore[method-assign]
    world.cluster.change("Deployment", "calculator-scorer", {"status": {"readyReplicas": 0}})
    await world.settle()
    assert (world.status()["phase"], world.status()["message"]) == ("Starting", message)
    assert ready(world) == ("False", reason, message)
    assert HIDDEN not in json.dumps(world.status()), "what a scorer logs is not for all who may read runs"


async def test_of_others_that_end_again_and_again_the_last_words_are_said(world: World) -> None:
    world.cluster.put(judged())
    world.cluster.put(run())
    await world.settle()
    container = {
        "name": "gateway",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 3, "message": "loading\n\x1b[31mno such model\n"}},
    }
    world.cluster.make_pods = lambda: None  # type: ignore[method-assign]
    world.cluster.change(
        "Pod", "calculator-gateway-0", {"status": {"phase": "Pending", "containerStatuses": [container]}}
    )
    await world.settle()
    assert str(world.status()["message"]).endswith("last with exit code 3: loading [31mno such model")


def test_a_run_in_a_queue_has_no_more_of_it_than_was_admitted() -> None:
    made = context(run(), judged(replicas=5))
    assert made.pool.reward.scorer is not None
    admission = {"podSetAssignments": [{"name": "scorer", "count": 2}, {"name": "rollout", "count": 1}]}
    within = within_admission(made, {"status": {"admission": admission}})
    assert within.pool.reward.scorer is not None
    assert (within.pool.reward.scorer.replicas, within.pool.replicas) == (2, 1)
    assert within_admission(made, None).pool.reward.scorer == made.pool.reward.scorer


async def test_it_is_weighed_with_the_run() -> None:
    world = World().with_kueue()
    world.cluster.put(storage_secret())
    world.cluster.put(judged(replicas=2, resources={"requests": {"cpu": "3"}}))
    world.cluster.put(run(scheduling={"queueName": "gpus"}))
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    world.cluster.put(queue | {"metadata": {"name": "gpus", "namespace": "team-a"}})
    await world.settle()
    workload = world.cluster.find("Workload", "calculator")
    assert workload is not None
    (found,) = [item for item in workload["spec"]["podSets"] if item["name"] == "scorer"]
    assert found["count"] == 2
    assert found["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "3"
