"""Whole runs in a fake cluster: what is there in each phase, and that nothing is written without need."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator.cluster.errors import ClusterError, ForbiddenError, UnavailableError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.observed import ObjectRef, RunContext
from kitestring_operator.parts.configs import gateway_config
from kitestring_operator.trainer_job import MOST_DISRUPTIONS
from tests.operator.documents import NAMESPACE, SETTINGS, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.world import World, report


@pytest.fixture
def world() -> World:
    made = World()
    made.cluster.put(storage_secret())
    made.cluster.put(pool())
    return made


async def started(world: World, **spec: Any) -> None:
    world.cluster.put(run(**spec))
    await world.settle()


async def running(world: World, **spec: Any) -> None:
    await started(world, **spec)
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"


def condition(world: World, kind: str) -> tuple[str, str]:
    found = next(entry for entry in world.status()["conditions"] if entry["type"] == kind)
    return found["status"], found["reason"]


async def test_a_run_starts_works_and_ends(world: World) -> None:
    await started(world)
    assert world.status()["phase"] == "Starting"
    assert world.there("Job") == {"calculator-trainer-1"}
    assert world.there("StatefulSet") == {"calculator-gateway", "calculator-policy"}
    assert world.there("Deployment") == {"calculator-collector", "calculator-rollout"}
    assert {"calculator-keys"} <= world.there("Secret")
    assert condition(world, "InferenceReady") == ("True", "Running")
    assert condition(world, "RolloutsReady") == ("True", "Running")
    assert condition(world, "TrainerReady") == ("False", "Starting")
    world.trainers.says = report(step=2, reward=0.5)
    await world.settle()
    assert (world.status()["phase"], world.status()["step"], world.status()["reward"]) == ("Running", 1, 0.5)
    assert condition(world, "TrainerReady") == ("True", "Running")
    result = {
        "phase": "Finished",
        "reason": "Completed",
        "step": 3,
        "checkpoint": "s3://runs/x/checkpoints/step-000003/",
        "reward": 0.75,
        "tokens": 99,
        "rollouts": {"classes": {"Succeeded": 11, "TimedOut": 1}, "retried": 2, "excluded": 1},
    }
    world.trainers.says = None
    world.cluster.end_job("calculator-trainer-1", message=json.dumps(result), is_over=False)
    await world.settle()
    world.cluster.end_job("calculator-trainer-1", message=json.dumps(result))
    await world.settle()
    status = world.status()
    assert (status["phase"], status["reason"], status["step"]) == ("Succeeded", "Completed", 3)
    assert status["checkpoint"] == result["checkpoint"]
    assert (status["reward"], status["tokens"], status["rolloutsRetried"]) == (0.75, 99, 2), "the last word counts"
    assert (status["rolloutsSucceeded"], status["rolloutsFailed"], status["rolloutsExcluded"]) == (11, 1, 1)
    assert condition(world, "Finished") == ("True", "Completed")
    assert world.there("StatefulSet") == world.there("Deployment") == set()
    assert world.there("Job") == {"calculator-trainer-1"}, "its log can still be read"
    assert world.there("Secret") >= {"calculator-keys"}


async def test_nothing_is_written_when_nothing_changed(world: World) -> None:
    await running(world)
    before = len(world.cluster.writes)
    await world.controller.resync()
    await world.settle()
    world.forget_pace()
    await world.settle()
    assert world.cluster.writes[before:] == []


async def test_a_namesakes_remains_are_not_taken_over(world: World) -> None:
    await running(world)
    old = world.cluster.find("TrainingRun", "calculator")
    assert old is not None
    # its objects linger, as with a garbage collector that has not come yet
    del world.cluster.objects[KINDS["TrainingRun"].ref(NAMESPACE, "calculator")]
    world.cluster.told.append(("DELETED", old))
    world.trainers.says = None
    world.cluster.put(run())
    world.deliver()
    new = world.cluster.find("TrainingRun", "calculator")
    assert new is not None
    before = len(world.cluster.writes)
    wait = await world.look(new)
    assert wait is not None and wait > 0
    assert {verb for verb, ref in world.cluster.writes[before:] if ref.kind != "Event"} <= {"status", "create"}
    for ref, item in list(world.cluster.objects.items()):
        if any(owner["uid"] == old["metadata"]["uid"] for owner in item["metadata"].get("ownerReferences") or ()):
            world.cluster.remove(ref) if ref in world.cluster.objects else None
    await world.settle()
    assert world.there("Job") == {"calculator-trainer-1"}


async def test_an_object_of_someone_else_is_never_touched(world: World) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "calculator-config", "namespace": NAMESPACE},
        "data": {"mine": "1"},
    }
    world.cluster.put(foreign)
    world.cluster.put(run())
    world.deliver()
    made = world.cluster.find("TrainingRun", "calculator")
    assert made is not None
    await world.look(made)
    there = world.cluster.find("ConfigMap", "calculator-config")
    assert there is not None and there["data"] == {"mine": "1"}
    world.forget_pace()
    await world.look(world.cache.get(KINDS["TrainingRun"].ref(NAMESPACE, "calculator")) or made)
    assert "ConfigMap calculator-config is there already and is not of this run" in world.status()["message"]
    world.cluster.remove(KINDS["ConfigMap"].ref(NAMESPACE, "calculator-config"))
    await world.settle()
    assert world.status()["message"] == "parts are being started"


def foreign_wall(name: str) -> dict[str, Any]:
    """A policy of someone else, which may allow everything."""
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": {}}


@pytest.mark.parametrize("name", ["calculator-rollout", "calculator-deny"])
async def test_no_pod_is_made_without_its_walls(world: World, name: str) -> None:
    wall = KINDS["NetworkPolicy"].ref(NAMESPACE, name)
    world.cluster.put(foreign_wall(name))
    await started(world)
    said = f"NetworkPolicy {name} is there already and is not of this run"
    assert said in world.status()["message"]
    assert {kind: world.there(kind) for kind in ("Job", "Deployment", "StatefulSet")} == {
        "Job": set(),
        "Deployment": set(),
        "StatefulSet": set(),
    }
    assert "calculator-keys" in world.there("Secret"), "the rest is there"
    assert [said in message for _, message in warnings(world)] == [True]
    world.cluster.remove(wall)
    await world.settle()
    assert world.there("Job") == {"calculator-trainer-1"}
    assert world.status()["message"] == "parts are being started"


async def test_a_run_that_works_gets_no_further_pods_without_their_walls(world: World) -> None:
    await running(world)
    world.cluster.remove(KINDS["NetworkPolicy"].ref(NAMESPACE, "calculator-rollout"))
    world.cluster.put(foreign_wall("calculator-rollout"))
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 5}})
    await world.controller.resync()
    await world.settle()
    assert len([pod for pod in world.there("Pod") if "rollout" in pod]) == 2
    assert ["calculator-rollout is there already" in message for _, message in warnings(world)] == [True]
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 1}})
    await world.controller.resync()
    await world.settle()
    assert len([pod for pod in world.there("Pod") if "rollout" in pod]) == 1, "fewer it may be"
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 5}})
    world.cluster.remove(KINDS["NetworkPolicy"].ref(NAMESPACE, "calculator-rollout"))
    await world.controller.resync()
    await world.settle()
    assert len([pod for pod in world.there("Pod") if "rollout" in pod]) == 5


async def test_a_disruption_budget_of_others_keeps_no_pod_from_starting(world: World) -> None:
    metadata = {"name": "calculator-gateway", "namespace": NAMESPACE}
    world.cluster.put({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": {}})
    await started(world)
    assert "PodDisruptionBudget calculator-gateway is there already" in world.status()["message"]
    assert world.there("Job") == {"calculator-trainer-1"}


async def test_a_run_takes_the_place_of_a_deleted_one_of_its_name(world: World) -> None:
    """What the first one owned has gone with it, and of most of that no watch has told."""
    await running(world)
    world.cluster.remove(KINDS["TrainingRun"].ref(NAMESPACE, "calculator"))
    world.trainers.says = None
    await started(world)
    assert world.there("Deployment") == {"calculator-collector", "calculator-rollout"}
    assert world.status()["message"] == "parts are being started"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(ForbiddenError, 403, "exceeded quota"), (UnavailableError, 500, "failed calling webhook")],
)
async def test_what_keeps_an_object_from_being_made_is_said_in_the_status(
    world: World, error: type[ClusterError], status: int, said: str
) -> None:
    class Forbidding(FakeCluster):
        async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
            if manifest["kind"] == "NetworkPolicy":
                raise error("apply NetworkPolicy team-a/x", status, said)
            return await super().apply(manifest)

    world = World(cluster=Forbidding())
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run())
    world.deliver()
    for _ in range(2):
        world.forget_pace()
        with pytest.raises(error):
            await world.look(next(iter(world.cache.of_kind("TrainingRun"))))
    assert world.status()["phase"] == "Starting"
    assert "startTime" not in world.status(), "run and pool may still be corrected"
    assert said in world.status()["message"]
    assert any(said in event["message"] for event in world.cluster.of_kind("Event"))


def stall(world: World, name: str, container: str, **state: Any) -> None:
    """A container of the pod waits, or ended and waits again."""
    waits = {"name": container, "image": "agent:1", **state}
    conditions = [{"type": "Ready", "status": "False"}]
    status = {"phase": "Pending", "conditions": conditions, "containerStatuses": [waits]}
    world.cluster.change("Pod", name, {"status": status})


def warnings(world: World) -> list[tuple[str, str]]:
    return [(said["reason"], said["message"]) for said in world.cluster.of_kind("Event") if said["type"] == "Warning"]


async def test_agents_that_cannot_start_are_told_of_once_for_each_cause(world: World) -> None:
    """The trainer works, the run is Running, and no rollout will ever end."""
    await running(world)
    assert warnings(world) == []
    told = []
    for reason, waiting in (
        ("ImagePull", {"reason": "ErrImagePull"}),
        ("ImagePull", {"reason": "ImagePullBackOff"}),
        ("ContainerStart", {"reason": "CreateContainerConfigError", "message": 'secret "tools" not found'}),
    ):
        for name in ("calculator-rollout-0", "calculator-rollout-1"):
            stall(world, name, "agent", state={"waiting": waiting})
        await world.settle()
        assert world.status()["phase"] == "Running"
        assert condition(world, "RolloutsReady") == ("False", reason)
        told.append(len(warnings(world)))
    assert told == [1, 1, 2]
    first, second = warnings(world)
    assert first == ("ImagePull", "pod calculator-rollout-0 cannot pull image agent:1: ErrImagePull")
    assert second[0] == "ContainerStart" and 'CreateContainerConfigError: secret "tools" not found' in second[1]


async def test_a_policy_server_that_cannot_start_is_told_of(world: World) -> None:
    await running(world)
    world.cluster.make_pods = lambda: None  # type: ignore[method-assign]
    ended = {"terminated": {"exitCode": 128, "reason": "StartError", "message": "no such program"}}
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    stall(world, "calculator-policy-0", "server", state=waits, lastState=ended)
    world.cluster.change("StatefulSet", "calculator-policy", {"status": {"readyReplicas": 0}})
    await world.settle()
    assert condition(world, "InferenceReady") == ("False", "ContainerStart")
    ((reason, message),) = warnings(world)
    assert reason == "ContainerStart" and message.endswith("last with exit code 128: no such program")


async def test_what_keeps_a_run_from_starting_is_told_of_once(world: World) -> None:
    """It is the reason of the phase and that of a condition."""
    await started(world)
    for name in ("calculator-rollout-0", "calculator-rollout-1"):
        stall(world, name, "agent", state={"waiting": {"reason": "ImagePullBackOff"}})
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Starting", "ImagePull")
    said = "pod calculator-rollout-0 cannot pull image agent:1: ImagePullBackOff"
    assert warnings(world) == [("ImagePull", f"Starting: {said}")]
    world.trainers.says = report()
    await world.settle()
    assert (world.status()["phase"], condition(world, "RolloutsReady")) == ("Running", ("False", "ImagePull"))
    assert len(warnings(world)) == 1


async def test_what_the_operator_may_not_read_is_said_in_the_status(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(ref: ObjectRef) -> dict[str, Any] | None:
        raise ForbiddenError(f"get {ref.kind} {ref.name}", 403, "secrets is forbidden")

    with monkeypatch.context() as hidden:
        hidden.setattr(world.cluster, "get", forbidden)
        world.cluster.put(run())
        world.deliver()
        wait = await world.look(next(iter(world.cache.of_kind("TrainingRun"))))
    assert wait is not None and wait > 0
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "Error")
    assert "get Secret storage-keys: secrets is forbidden (403); give the operator" in world.status()["message"]
    assert any("secrets is forbidden" in event["message"] for event in world.cluster.of_kind("Event"))
    assert world.there("Job") == set()
    await world.settle()
    assert world.status()["phase"] == "Starting"


async def test_a_log_that_cannot_be_had_keeps_no_trainer_from_its_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of a trainer that crashed is lost since: the API server cannot ask its kubelet."""
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)

    async def away(*_: object, **__: object) -> str:
        raise UnavailableError("log Pod", 502, "no route to host")

    monkeypatch.setattr(world.cluster, "log_tail", away)
    await running(world)
    world.cluster.end_job("calculator-trainer-1", code=1)
    world.trainers.says = None
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")
    assert "ended with code 1" in world.status()["lastError"]


async def test_suspend_ends_the_trainer_and_the_agents_first(world: World) -> None:
    await running(world)
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    world.deliver()
    made = world.cluster.find("TrainingRun", "calculator")
    assert made is not None
    gateway = world.cluster.find("StatefulSet", "calculator-gateway")
    # the trainer's pod writes its state while it is being deleted
    dying = next(
        pod for pod in world.cluster.of_kind("Pod") if pod["metadata"]["name"].startswith("calculator-trainer")
    )
    await world.look(made)
    assert not world.there("Job") and "calculator-rollout" not in world.there("Deployment")
    assert gateway is not None and "calculator-gateway" in world.there("StatefulSet")
    assert world.status()["phase"] == "Suspending"
    assert dying["metadata"]["name"] not in world.there("Pod")
    await world.settle()
    assert world.status()["phase"] == "Suspended"
    assert world.there("StatefulSet") == world.there("Deployment") == world.there("Job") == world.there("Pod") == set()
    assert {"calculator-keys"} <= world.there("Secret")
    assert condition(world, "Suspended") == ("True", "SuspendRequested")
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": False}})
    world.trainers.says = None
    await world.settle()
    assert world.status()["phase"] == "Starting"
    assert condition(world, "Suspended")[0] == "False"
    assert world.there("Job") == {"calculator-trainer-1"}
    assert "calculator-rollout" in world.there("Deployment"), "no watch has told that the first one has gone"


async def test_the_rest_waits_for_the_trainers_pod(world: World) -> None:
    await running(world)
    lingering = next(p for p in world.cluster.of_kind("Pod") if p["metadata"]["name"] == "calculator-trainer-1-0")
    lingering = json.loads(json.dumps(lingering))
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    world.deliver()
    made = world.cluster.find("TrainingRun", "calculator")
    assert made is not None
    await world.look(made)
    world.cluster.put(lingering | {"metadata": lingering["metadata"] | {"ownerReferences": []}})
    await world.settle()
    assert world.there("StatefulSet") == {"calculator-gateway", "calculator-policy"}
    world.cluster.remove(KINDS["Pod"].ref(NAMESPACE, "calculator-trainer-1-0"))
    await world.settle()
    assert world.status()["phase"] == "Suspended"


@pytest.mark.parametrize(
    ("code", "disrupted", "counts"), [(1, False, 1), (137, True, 0), (143, False, 0), (None, False, 0)]
)
async def test_a_lost_trainer_is_started_again(
    world: World, code: int | None, disrupted: bool, counts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    await running(world)
    world.cluster.logs["calculator-trainer-1-0"] = "Traceback\nBoom"
    world.cluster.end_job("calculator-trainer-1", code=code, disrupted=disrupted)
    world.trainers.says = None
    await world.settle()
    assert (world.status()["phase"], world.status()["restarts"]) == ("Restarting", counts)
    assert world.there("Job") == {"calculator-trainer-1", "calculator-trainer-2"}
    assert ("lastError" in world.status()) == bool(counts)
    world.trainers.says = report(step=2)
    await world.settle()
    assert world.status()["phase"] == "Running"
    assert world.status()["restarts"] == counts


async def test_the_last_error_has_the_end_of_long_lines(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Ray and verl are longer than all that is kept, and what ended the trainer comes last."""
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    await running(world)
    world.cluster.logs["calculator-trainer-1-0"] = "\n".join(["x" * 9000] * 19 + ["ValueError: the cause"])
    world.cluster.end_job("calculator-trainer-1", code=1)
    world.trainers.says = None
    await world.settle()
    said = world.status()["lastError"]
    assert said.endswith("x\nValueError: the cause")
    assert len(said) < 5000


async def test_restarts_are_counted_and_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    await started(world, failurePolicy={"maxRestarts": 2})
    for number in (1, 2, 3):
        assert world.status()["phase"] in ("Starting", "Restarting")
        world.cluster.logs[f"calculator-trainer-{number}-0"] = f"boom {number}"
        world.cluster.end_job(f"calculator-trainer-{number}", code=1)
        await world.settle()
    status = world.status()
    assert (status["phase"], status["reason"], status["restarts"]) == ("Failed", "TooManyRestarts", 3)
    assert status["lastError"].endswith("boom 3")
    assert world.there("StatefulSet") == world.there("Deployment") == set()


@pytest.mark.parametrize("reason", ["ScorerUnreachable", "StorageUnavailable"])
async def test_what_used_the_restarts_up_is_told(world: World, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    await started(world, failurePolicy={"maxRestarts": 1})
    said = json.dumps({"phase": "Failed", "reason": reason, "message": "it is away", "exit_code": 1})
    world.cluster.end_job("calculator-trainer-1", code=1, message=said)
    await world.settle()
    assert world.status()["phase"] in ("Starting", "Restarting")
    world.cluster.end_job("calculator-trainer-2", code=1, message=said)
    await world.settle()
    status = world.status()
    assert (status["phase"], status["reason"], status["restarts"]) == ("Failed", reason, 2)
    assert status["message"] == "the trainer was lost 2 times, failurePolicy.maxRestarts is 1; it is away"
    assert condition(world, "Finished") == ("True", reason)


async def test_a_trainer_that_is_taken_away_for_ever_ends_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that fills the memory of each node it comes to."""
    monkeypatch.setattr("kitestring_operator.lifecycle.FIRST_RESTART_SECONDS", 0.0)
    await running(world, failurePolicy={"maxRestarts": 1})
    for number in range(1, MOST_DISRUPTIONS + 3):
        assert world.status()["restarts"] == max(0, number - 1 - MOST_DISRUPTIONS)
        world.cluster.end_job(f"calculator-trainer-{number}", code=137, disrupted=True)
        await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Failed", "TooManyRestarts")
    assert "12 such ends since the last new step" in world.status()["message"]


async def test_the_second_time_in_a_row_the_cluster_gets_time(world: World) -> None:
    await running(world)
    world.cluster.end_job("calculator-trainer-1", code=137, disrupted=True)
    await world.settle()
    assert "calculator-trainer-2" in world.there("Job")
    world.cluster.end_job("calculator-trainer-2", code=137, disrupted=True)
    await world.settle()
    assert "it is started again in" in world.status()["message"]
    assert "calculator-trainer-3" not in world.there("Job")


async def test_a_verdict_of_the_trainer_ends_the_run(world: World) -> None:
    await running(world)
    result = {"phase": "Failed", "reason": "StepsSkipped", "message": "3 steps in a row\x00", "step": 1, "exit_code": 3}
    world.cluster.end_job("calculator-trainer-1", code=3, message=json.dumps(result))
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Failed", "StepsSkipped")
    assert world.status()["message"] == "3 steps in a row?"


async def test_what_cannot_be_carried_out_is_said_once(world: World) -> None:
    world.cluster.refuses["calculator-gateway"] = "spec.template.spec.containers[0].image: Required value"
    await started(world)
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "InvalidSpec")
    assert "Required value" in world.status()["message"]
    assert world.there("Deployment") == world.there("Job") == set(), "half a run holds no pods"
    assert "it is tried again at each resync" in world.status()["message"]
    before, stands = len(world.cluster.writes), world.status()
    await world.settle()
    assert len(world.cluster.writes) == before
    await world.controller.resync()
    await world.settle()
    assert [(verb, ref.name) for verb, ref in world.cluster.writes[before:]] == [("apply", "calculator-gateway")]
    assert world.status() == stands, "nobody is told anything new"
    del world.cluster.refuses["calculator-gateway"]
    world.cluster.change("TrainingRun", "calculator", {"spec": {"steps": 4}})
    await world.settle()
    assert condition(world, "Accepted") == ("True", "Accepted")
    assert "calculator-gateway" in world.there("StatefulSet")


@pytest.mark.parametrize("isolation", ["Worker", "Job"])
async def test_a_pool_without_an_image_is_refused_before_anything_is_made(isolation: str) -> None:
    """On one machine such a pool is right: a user who brings it to a cluster corrects it and goes on."""
    world = World()
    world.cluster.put(storage_secret())
    without = pool(isolation=isolation)
    agent = without["spec"]["template"]["spec"]["containers"][0]
    del agent["image"]
    world.cluster.put(without)
    await started(world)
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "InvalidSpec")
    assert "spec.template.spec.containers[agent].image: found nothing" in world.status()["message"]
    assert "startTime" not in world.status()
    assert {ref.kind for verb, ref in world.cluster.writes if verb == "apply"} == {"Event"}
    template = {"spec": {"containers": [agent | {"image": "agent:1"}]}}
    world.cluster.change("RolloutPool", "calc", {"spec": {"template": template}})
    await world.settle()
    assert world.status()["phase"] == "Starting"


async def test_what_is_refused_of_the_workers_keeps_the_run_from_its_start(world: World) -> None:
    """What the API server alone can judge of a pool, such as a mount of a volume that is not there."""
    world.cluster.refuses["calculator-rollout"] = "volumeMounts[0].name: Not found"
    await started(world)
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "InvalidSpec")
    assert "startTime" not in world.status()
    made = [ref.name for verb, ref in world.cluster.writes if verb == "apply" and ref.kind == "Job"]
    assert made == [], "the trainer was never there"
    assert world.there("Deployment") == world.there("StatefulSet") == set(), "half a run holds no pods"
    del world.cluster.refuses["calculator-rollout"]
    world.cluster.change("RolloutPool", "calc", {"spec": {"rolloutsPerWorker": 2}})
    await world.settle()
    assert (world.status()["phase"], condition(world, "Accepted")[0]) == ("Starting", "True")
    assert "startTime" in world.status()


async def test_what_was_refused_is_carried_out_once_nothing_refuses_it(world: World) -> None:
    world.cluster.refuses["calculator-gateway"] = "a policy of the cluster forbids it"
    await started(world)
    assert world.status()["phase"] == "Pending"
    world.cluster.refuses.clear()
    await world.controller.resync()
    await world.settle()
    assert world.status()["phase"] == "Starting"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"rollouts": {"poolRef": {"name": "nowhere"}}}, names.REASON_POOL_NOT_FOUND),
        ({"trainer": {"backend": "collect", "mode": "managed", "device": "cpu"}}, names.REASON_NOT_SUPPORTED),
        ({"tasks": {"train": {"path": "tasks.txt"}}}, names.REASON_INVALID_SPEC),
        ({"storage": None}, names.REASON_INVALID_SPEC),
        (
            {"gateway": {"template": {"spec": {"containers": [{"name": "gateway", "$patch": "delete"}]}}}},
            names.REASON_INVALID_SPEC,
        ),
        ({"storage": {"bucket": "runs", "credentialsSecretRef": {"name": "no"}}}, names.REASON_REFERENCE_NOT_FOUND),
    ],
)
async def test_a_run_that_cannot_start_says_why(world: World, spec: dict[str, Any], reason: str) -> None:
    await started(world, **spec)
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", reason)
    assert condition(world, "Accepted") == ("False", reason)
    assert world.there("Job") == set()
    assert "startTime" not in world.status()


async def test_what_was_missing_and_comes_is_noticed(world: World) -> None:
    world.cluster.remove(KINDS["Secret"].ref(NAMESPACE, "storage-keys"))
    await started(world)
    assert world.status()["reason"] == "ReferenceNotFound"
    assert "spec.storage.credentialsSecretRef: there is no Secret storage-keys" in world.status()["message"]
    world.cluster.put(storage_secret() | {"data": {"accessKeyId": "aWQ="}})
    await world.settle()
    assert "has no key secretAccessKey" in world.status()["message"]
    world.cluster.change("Secret", "storage-keys", {"data": {"secretAccessKey": "a2V5"}})
    await world.settle()
    assert world.status()["phase"] == "Starting"


async def test_another_controllers_run_is_left_alone(world: World) -> None:
    await started(world, managedBy="elsewhere.example/controller")
    assert world.status() == {}
    assert world.there("Job") == set()


async def test_sizes_and_steps_change_while_it_runs(world: World) -> None:
    await running(world)
    assert world.trainers.told_live[-1]["steps"] == 3
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 5}})
    world.cluster.change("TrainingRun", "calculator", {"spec": {"steps": 9, "gateway": {"replicas": 2}}})
    await world.settle()
    workers = world.cluster.find("Deployment", "calculator-rollout")
    gateways = world.cluster.find("StatefulSet", "calculator-gateway")
    assert workers is not None and workers["spec"]["replicas"] == 5
    assert gateways is not None and gateways["spec"]["replicas"] == 2
    assert world.trainers.told_live[-1]["steps"] == 9
    assert len(world.trainers.told_live[-1]["gateways"]) == 2
    found = world.cluster.find("RolloutPool", "calc")
    assert found is not None
    assert (found["status"]["replicas"], found["status"]["runs"], found["status"]["users"]) == (5, 1, ["calculator"])


async def test_a_newer_operator_leaves_what_runs_the_config_that_it_was_started_with(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_newer(context: RunContext) -> dict[str, Any]:
        return gateway_config(context) | {"a_new_field": 1}

    def config(file: str) -> dict[str, Any]:
        found = world.cluster.find("ConfigMap", "calculator-config")
        assert found is not None
        read: dict[str, Any] = json.loads(found["data"][file])
        return read

    await running(world)
    world.cluster.change("ConfigMap", "calculator-config", {"data": {"of-old.json": "{}"}})
    old = config("trainer.json")
    monkeypatch.setattr("kitestring_operator.parts.configs.gateway_config", of_the_newer)
    images = SETTINGS.images.model_copy(update={"rollout": "kitestring/rollout:2", "trainer": "kitestring/trainer:2"})
    newer = World(SETTINGS.model_copy(update={"images": images}), world.cluster)
    newer.trainers.says = report()
    newer.cluster.change("TrainingRun", "calculator", {"spec": {"steps": 9, "inference": {"replicas": 2}}})
    await newer.controller.resync()
    await newer.settle()
    gateway = world.cluster.find("StatefulSet", "calculator-gateway")
    assert gateway is not None
    assert gateway["spec"]["template"]["spec"]["containers"][0]["image"] == "kitestring/rollout:1"
    assert "a_new_field" not in config("gateway.json")
    assert len(config("gateway.json")["policies"][0]["servers"]) == 2
    assert config("trainer.json") == old
    assert config("of-old.json") == {}
    # the next trainer is of the newer image
    newer.cluster.end_job("calculator-trainer-1", code=143)
    newer.trainers.says = None
    await newer.settle()
    assert "calculator-trainer-2" in newer.there("Job")
    assert config("trainer.json")["spec"]["steps"] == 9
    assert "a_new_field" not in config("gateway.json")
    # and after a pause, everything
    newer.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await newer.settle()
    newer.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": False}})
    await newer.settle()
    assert config("gateway.json")["a_new_field"] == 1
    assert "of-old.json" not in (world.cluster.find("ConfigMap", "calculator-config") or {})["data"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"policies": [1]}', '{"policies": [{"servers": []}]}'])
async def test_the_gateways_config_of_another_version_may_be_anything(world: World, text: str) -> None:
    await running(world)
    world.cluster.change("ConfigMap", "calculator-config", {"data": {"gateway.json": text}})
    images = SETTINGS.images.model_copy(update={"rollout": "kitestring/rollout:2"})
    newer = World(SETTINGS.model_copy(update={"images": images}), world.cluster)
    newer.trainers.says = report()
    await newer.controller.resync()
    await newer.settle()
    found = world.cluster.find("ConfigMap", "calculator-config")
    assert found is not None and found["data"]["gateway.json"] == text


async def test_what_may_change_meanwhile_is_in_the_configs(world: World) -> None:
    """The next process of a part is to start with it."""
    await running(world)
    world.cluster.change("TrainingRun", "calculator", {"spec": {"steps": 9, "inference": {"replicas": 2}}})
    await world.settle()
    found = world.cluster.find("ConfigMap", "calculator-config")
    assert found is not None
    assert json.loads(found["data"]["trainer.json"])["spec"]["steps"] == 9
    assert len(json.loads(found["data"]["gateway.json"])["policies"][0]["servers"]) == 2


async def test_of_policy_servers_nothing_is_said_where_there_are_none(world: World) -> None:
    served_elsewhere = {"name": "policy", "train": False, "endpoint": {"url": "http://models:8000/v1", "model": "m"}}
    await running(world, policies=[served_elsewhere])
    assert world.there("StatefulSet") == {"calculator-gateway"}
    assert world.trainers.told_live[-1].keys() == {"steps", "gateways"}


async def test_another_operator_changes_nothing_before_it_has_asked(world: World) -> None:
    await running(world)
    before = len(world.cluster.writes)
    another = World(cluster=world.cluster)
    await another.controller.resync()
    for kind in ("TrainingRun", "RolloutPool"):
        for item in list(another.cache.of_kind(kind)):
            await another.look(item)
    assert world.cluster.writes[before:] == []


async def test_a_phase_of_another_version_is_none(world: World) -> None:
    await running(world)
    world.cluster.change("TrainingRun", "calculator", {"status": {"phase": "Hibernating"}})
    await world.settle()
    assert world.status()["phase"] == "Running"


async def test_a_deleted_run_is_left_to_the_garbage_collector(world: World) -> None:
    await running(world)
    before = len(world.cluster.writes)
    world.cluster.remove(KINDS["TrainingRun"].ref(NAMESPACE, "calculator"))
    await world.settle()
    assert [verb for verb, ref in world.cluster.writes[before:] if ref.kind != "RolloutPool"] == []
    assert world.there("Job") == world.there("Pod") == set()
    assert world.there("Secret") == {"storage-keys"}


async def test_time_to_live(world: World) -> None:
    await running(world, ttlSecondsAfterFinished=0)
    world.cluster.end_job("calculator-trainer-1")
    await world.settle()
    assert world.there("TrainingRun") == set()


async def test_a_deadline_ends_the_run(world: World) -> None:
    await running(world, activeDeadlineSeconds=3600)
    started_at = {"startTime": "2020-01-01T00:00:00Z"}
    world.cluster.change("TrainingRun", "calculator", {"status": started_at})
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Failed", "DeadlineExceeded")
    assert world.there("Job") == world.there("StatefulSet") == world.there("Pod") == set()
