"""Kueue: a run is one Workload; it holds pods while that is admitted, and gives the quota back when they are gone.

Kueue itself is played here: `admit` and `evict` write what it writes (v1beta2).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.operator.store import now
from kitestring_api.names import CLASS_INVALID_TASK, LABEL_COMPONENT
from kitestring_operator.cluster.errors import ForbiddenError, RefusedError, UnavailableError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.observed import Manifest, ObjectRef, Observed, Placement, RunContext, WantedRollout
from kitestring_operator.pods import condition
from kitestring_operator.queueing import placed, pod_set_names, within_admission, workload_of
from tests.operator.documents import NAMESPACE, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.parts.rendering import context
from tests.operator.world import World, report

HIGH = {"metadata": {"name": "high", "namespace": ""}}
QUEUED = {"scheduling": {"queueName": "gpus"}}


def entry(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}


def tell(world: World, *entries: dict[str, Any], admission: Any = "keep") -> None:
    workload = the_workload(world)
    types = {item["type"] for item in entries}
    kept = [item for item in workload.get("status", {}).get("conditions", []) if item["type"] not in types]
    status: dict[str, Any] = {"conditions": [*kept, *entries]}
    if admission != "keep":
        status["admission"] = admission
    world.cluster.change("Workload", "calculator", {"status": status})


def admit(world: World, flavor: str = "spot") -> None:
    pod_sets = the_workload(world)["spec"]["podSets"]
    assigned = [{"name": item["name"], "count": item["count"], "flavors": {"cpu": flavor}} for item in pod_sets]
    told = [entry(kind, "True", kind) for kind in ("QuotaReserved", "Admitted")]
    tell(world, *told, entry("Evicted", "False", "QuotaReserved"), admission={"podSetAssignments": assigned})


def evict(world: World, reason: str = "Preempted") -> None:
    tell(world, entry("Evicted", "True", reason, "made way for another"))


def the_workload(world: World) -> Manifest:
    found = world.cluster.find("Workload", "calculator")
    assert found is not None
    return found


async def queued(**spec: Any) -> World:
    world = World().with_kueue()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    local_queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpus"}}
    world.cluster.put(local_queue | {"metadata": {"name": "gpus", "namespace": NAMESPACE}})
    flavor = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ResourceFlavor",
        "metadata": {"name": "spot", "namespace": ""},
    }
    tolerations = [{"key": "spot", "operator": "Exists"}]
    world.cluster.put(flavor | {"spec": {"nodeLabels": {"node": "spot"}, "tolerations": tolerations}})
    world.cluster.put(run(**QUEUED | spec))
    await world.settle()
    return world


async def admitted() -> World:
    world = await queued()
    admit(world)
    await world.settle()
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"
    return world


async def test_before_admission_there_is_no_pod() -> None:
    world = await queued()
    assert (world.status()["phase"], world.status()["reason"]) == ("Queued", "WaitingForQueue")
    assert world.there("Job") == world.there("StatefulSet") == world.there("Deployment") == set()
    assert "startTime" not in world.status()
    spec = the_workload(world)["spec"]
    assert spec["queueName"] == "gpus"
    assert {item["name"]: item["count"] for item in spec["podSets"]} == {
        "collector": 1,
        "gateway": 1,
        "policy-server": 1,
        "trainer": 1,
        "rollout": 2,
    }
    for item in spec["podSets"]:
        assert not {"volumes", "securityContext"} & item["template"]["spec"].keys()
        assert all(container["image"] for container in item["template"]["spec"]["containers"])
    before = len(world.cluster.writes)
    await world.controller.resync()
    await world.settle()
    assert world.cluster.writes[before:] == []


async def test_the_workload_names_its_run_as_kueue_looks_for_it() -> None:
    world = await queued()
    uid = next(iter(world.cluster.of_kind("TrainingRun")))["metadata"]["uid"]
    assert the_workload(world)["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == uid


WEIGHTS = st.fixed_dictionaries(
    {"cpu": st.sampled_from(["1", "2"]), "node": st.sampled_from(["", "a"]), "policy": st.sampled_from("xyz")}
)


@given(st.lists(st.tuples(st.sampled_from(["policy-server", "rollout"]), st.integers(0, 3), WEIGHTS), max_size=8))
def test_each_pod_is_counted_as_its_own_template_says(drawn: list[tuple[str, int, dict[str, str]]]) -> None:
    objects = [
        stateful_set(f"{part}-{number}", part, replicas, weight)
        for number, (part, replicas, weight) in enumerate(drawn)
    ]
    workload = workload_of(context(run(**QUEUED), pool()), objects, None)
    pod_sets = {item["name"]: item for item in workload["spec"]["podSets"]}
    assert (
        len(pod_sets) == len(workload["spec"]["podSets"]) == len({(part, w["cpu"], w["node"]) for part, _, w in drawn})
    )
    assert {part for part, *_ in drawn} <= pod_sets.keys(), "the first set of a part has its name"
    names = pod_set_names(objects)
    for item in objects:
        its = pod_sets[names[item["metadata"]["name"]]]["template"]["spec"]
        spec = item["spec"]["template"]["spec"]
        assert its["containers"] == spec["containers"] and its["nodeSelector"] == spec["nodeSelector"]
    for name, pod_set in pod_sets.items():
        of_it = [item["spec"]["replicas"] for item in objects if names[item["metadata"]["name"]] == name]
        assert pod_set["count"] == sum(of_it)


def stateful_set(name: str, part: str, replicas: int, weight: dict[str, str]) -> Manifest:
    container = {"name": "server", "image": "server:1", "resources": {"requests": {"cpu": weight["cpu"]}}}
    spread = [{"topologyKey": "zone", "labelSelector": {"matchLabels": {"policy": weight["policy"]}}}]
    spec = {"containers": [container], "nodeSelector": {"node": weight["node"]}, "topologySpreadConstraints": spread}
    return {
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": {LABEL_COMPONENT: part}},
        "spec": {"replicas": replicas, "template": {"metadata": {}, "spec": spec}},
    }


def two_policies(replicas: int) -> RunContext:
    policies = [{"name": name, "model": {"path": "./model"}} for name in ("one", "two")]
    return context(run(**QUEUED, policies=policies, inference={"backend": "cpu", "replicas": replicas}), pool())


@pytest.mark.parametrize("named", [{"policy-server": 4}, {"policy-server": 2, "policy-server-2": 2}])
def test_servers_of_several_policies_grow_no_further_than_was_admitted(named: dict[str, int]) -> None:
    assignments = [{"name": name, "count": count} for name, count in named.items()]
    workload = {"status": {"admission": {"podSetAssignments": assignments}}}
    assert within_admission(two_policies(3), workload).spec.inference.replicas == 2
    assert within_admission(two_policies(1), workload).spec.inference.replicas == 1


async def test_each_object_goes_where_its_pod_set_was_admitted() -> None:
    world = await admitted()
    observed = Observed(
        now=datetime.now(UTC),
        run=run(),
        spec=None,
        problems=(),
        pool=None,
        workload=the_workload(world),
        flavors={"spot": Placement({"node": "spot"})},
    )
    item = stateful_set("x", "policy-server", 1, {"cpu": "1", "node": "", "policy": "x"})
    item["spec"]["template"]["spec"].pop("nodeSelector")
    assert placed(item, {"x": "policy-server"}, observed)["spec"]["template"]["spec"]["nodeSelector"] == {
        "node": "spot"
    }
    assert placed(item, {"x": "policy-server-2"}, observed) == item


async def test_a_queued_run_says_why_its_workload_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kueue's webhook is away: to say that the queue has not seen the run would send people to the queue."""
    world = await queued(suspend=True)
    apply = FakeCluster.apply

    async def away(self: FakeCluster, manifest: Manifest) -> Manifest:
        if manifest["kind"] == "Workload":
            raise UnavailableError("apply Workload", 500, "failed calling webhook")
        return await apply(self, manifest)

    monkeypatch.setattr(FakeCluster, "apply", away)
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": False}})
    world.deliver()
    for _ in range(2):
        world.forget_pace()
        with pytest.raises(UnavailableError):
            await world.look(next(iter(world.cache.of_kind("TrainingRun"))))
    assert world.status()["phase"] == "Queued"
    assert "failed calling webhook" in world.status()["message"]


async def test_what_waits_is_said() -> None:
    world = await queued()
    tell(world, entry("QuotaReserved", "False", "Pending", "couldn't assign flavors: insufficient quota for cpu"))
    await world.settle()
    assert "insufficient quota for cpu" in world.status()["message"]


@pytest.mark.parametrize("kind", ["ResourceFlavor", "PriorityClass"])
async def test_what_the_queue_says_and_cannot_be_read_holds_the_run_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods without the labels of their flavor, or a Workload without its priority, would be others."""
    by_priority = kind == "PriorityClass"
    get = FakeCluster.get

    async def forbidden(self: FakeCluster, ref: ObjectRef) -> Manifest | None:
        if ref.kind == kind:
            raise ForbiddenError(f"get {kind} {ref.name}", 403, "forbidden")
        return await get(self, ref)

    monkeypatch.setattr(FakeCluster, "get", forbidden)
    world = await queued(**({"scheduling": {"queueName": "gpus", "priorityClassName": "high"}} if by_priority else {}))
    if not by_priority:
        admit(world)
        await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "Error")
    assert f"get {kind} {'high' if by_priority else 'spot'}: forbidden (403)" in world.status()["message"]
    assert world.there("Job") == world.there("StatefulSet") == set()
    assert (world.there("Workload") == set()) == by_priority
    monkeypatch.setattr(FakeCluster, "get", get)
    world.cluster.put({"kind": "PriorityClass", "apiVersion": "scheduling.k8s.io/v1", "value": 7} | HIGH)
    await world.settle()
    assert world.status()["phase"] == ("Queued" if by_priority else "Starting")
    assert the_workload(world)["spec"].get("priority") == (7 if by_priority else None)


async def test_flavors_and_priorities_are_read_again_after_a_resync(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await queued(scheduling={"queueName": "gpus", "priorityClassName": "high"})
    high = {"kind": "PriorityClass", "apiVersion": "scheduling.k8s.io/v1"} | HIGH
    world.cluster.put(high | {"value": 7})
    await world.settle()
    world.cluster.put(high | {"value": 8})
    await world.controller.resync()
    await world.settle()
    assert the_workload(world)["spec"]["priority"] == 8
    admit(world)
    await world.settle()
    world.cluster.change("ResourceFlavor", "spot", {"spec": {"nodeLabels": {"node": "cheap"}}}, namespace="")
    await world.controller.resync()
    await world.settle()
    assert node_of_workers(world) == "cheap"

    async def away(_: ObjectRef) -> None:
        raise UnavailableError("get", 503, "later")

    monkeypatch.setattr(world.cluster, "get", away)
    await world.controller.resync()
    await world.settle()
    assert (node_of_workers(world), world.status()["phase"]) == ("cheap", "Starting"), "what was known still holds"


def node_of_workers(world: World) -> str:
    found = world.cluster.find("Deployment", "calculator-rollout")
    assert found is not None
    return str(found["spec"]["template"]["spec"]["nodeSelector"]["node"])


async def test_admission_starts_the_run_where_the_queue_wants_it() -> None:
    world = await admitted()
    for kind in ("Job", "StatefulSet", "Deployment"):
        for item in world.cluster.of_kind(kind):
            template = item["spec"]["template"]["spec"]
            assert template["nodeSelector"]["node"] == "spot"
            assert {"key": "spot", "operator": "Exists"} in template["tolerations"]
    assert condition(the_workload(world), "PodsReady") == "True"


async def test_preemption_stops_cleanly_gives_the_quota_back_and_queues_again() -> None:
    world = await admitted()
    evict(world)
    await world.settle()
    status = world.status()
    assert (status["phase"], status["reason"]) == ("Queued", "Preempted")
    assert world.there("Job") == world.there("StatefulSet") == world.there("Pod") == set()
    workload = the_workload(world)
    assert condition(workload, "QuotaReserved") == condition(workload, "Admitted") == "False"
    assert condition(workload, "Requeued") == "True"
    assert "admission" not in workload["status"]
    suspended = next(item for item in status["conditions"] if item["type"] == "Suspended")
    assert (suspended["status"], suspended["reason"]) == ("True", "Preempted")
    world.trainers.says = None
    admit(world)
    await world.settle()
    assert world.status()["phase"] == "Starting"
    assert world.status()["restarts"] == 0
    world.trainers.says = report(step=3)
    await world.settle()
    assert (world.status()["phase"], world.status()["step"]) == ("Running", 2)


async def test_the_quota_is_kept_until_the_last_pod_is_gone() -> None:
    world = await admitted()
    evict(world)
    world.deliver()
    for item in list(world.cache.of_kind("TrainingRun")):
        await world.look(item)
    assert world.status()["phase"] == "Suspending"
    assert condition(the_workload(world), "QuotaReserved") == "True"


async def test_the_end_of_a_run_is_the_end_of_its_workload() -> None:
    world = await admitted()
    world.cluster.end_job("calculator-trainer-1")
    await world.settle()
    assert world.status()["phase"] == "Succeeded"
    finished = next(item for item in the_workload(world)["status"]["conditions"] if item["type"] == "Finished")
    assert (finished["status"], finished["reason"]) == ("True", "Succeeded")


async def test_a_run_that_its_user_suspends_leaves_the_queue() -> None:
    world = await admitted()
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    assert world.status()["phase"] == "Suspended"
    assert world.there("Workload") == set()
    assert admission_of(world)[:2] == ("False", "SuspendRequested")
    assert "its user" in admission_of(world)[2]
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": False}})
    await world.settle()
    assert world.status()["phase"] == "Queued"
    assert world.there("Workload") == {"calculator"}
    assert admission_of(world)[1] == "WaitingForQueue"


async def test_a_waiting_run_that_is_refused_holds_no_quota() -> None:
    """Of a run that waits the pool may change: into one that nothing can be made of, or that is not there."""
    world = await queued()
    asked = the_workload(world)
    world.cluster.remove(KINDS["RolloutPool"].ref(NAMESPACE, pool()["metadata"]["name"]))
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "PoolNotFound")
    assert world.there("Workload") == set()
    world.cluster.put(pool())
    await world.settle()
    assert world.status()["phase"] == "Queued"
    assert the_workload(world)["spec"] == asked["spec"]


async def test_a_run_that_the_api_server_refuses_stays_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again at each resync: with a Workload made anew it would displace others each time."""
    world = await queued()
    before = the_workload(world)["metadata"]["uid"]
    apply = FakeCluster.apply

    async def refuse(self: FakeCluster, manifest: Manifest) -> Manifest:
        if manifest["kind"] == "StatefulSet":
            raise RefusedError("apply StatefulSet", 422, "spec.template.spec.volumes[0]: Invalid value")
        return await apply(self, manifest)

    monkeypatch.setattr(FakeCluster, "apply", refuse)
    admit(world)
    for _ in range(2):
        await world.settle()
        assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "InvalidSpec")
        assert "spec.template.spec.volumes[0]: Invalid value" in world.status()["message"]
        assert the_workload(world)["metadata"]["uid"] == before
        await world.controller.resync()


async def test_a_waiting_run_that_its_user_suspends_does_not_say_that_it_waits() -> None:
    world = await queued()
    tell(world, entry("QuotaReserved", "False", "Pending", "insufficient quota for cpu"))
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    assert (world.status()["phase"], world.status()["message"]) == ("Suspended", "spec.suspend is true")
    assert admission_of(world)[:2] == ("False", "SuspendRequested")


def admission_of(world: World) -> tuple[str, str, str]:
    said = next(item for item in world.status()["conditions"] if item["type"] == "Admitted")
    return said["status"], said["reason"], said["message"]


async def test_no_more_workers_than_were_admitted() -> None:
    world = await admitted()
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 7}})
    await world.settle()
    workers = world.cluster.find("Deployment", "calculator-rollout")
    assert workers is not None and workers["spec"]["replicas"] == 2
    said = next(item for item in world.status()["conditions"] if item["type"] == "Admitted")
    assert "2 of 7 workers" in said["message"]
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 1}})
    await world.settle()
    assert world.cluster.find("Deployment", "calculator-rollout")["spec"]["replicas"] == 1  # type: ignore[index]


async def test_a_waiting_run_may_be_changed() -> None:
    world = await queued()
    world.cluster.change("RolloutPool", "calc", {"spec": {"replicas": 5}})
    await world.settle()
    counts = {item["name"]: item["count"] for item in the_workload(world)["spec"]["podSets"]}
    assert counts["rollout"] == 5


@pytest.mark.parametrize("exists", [True, False])
async def test_priority(exists: bool) -> None:
    world = World().with_kueue()
    if exists:
        metadata = {"name": "high", "namespace": ""}
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        world.cluster.put({**kind, "metadata": metadata, "value": 1000})
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpus"}}
    world.cluster.put(queue | {"metadata": {"name": "gpus", "namespace": NAMESPACE}})
    world.cluster.put(run(scheduling={"queueName": "gpus", "priorityClassName": "high"}))
    await world.settle()
    if not exists:
        assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "ReferenceNotFound")
        assert "there is no PriorityClass high" in world.status()["message"]
        return
    spec = the_workload(world)["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (1000, "high")


async def test_a_spec_that_cannot_be_read_gives_no_quota_back() -> None:
    """As with an operator of an older version: the pods go on, and others would be admitted beside them."""
    world = await admitted()
    world.cluster.change("TrainingRun", "calculator", {"spec": {"steps": "many"}})
    await world.settle()
    assert world.status()["reason"] == "InvalidSpec"
    assert condition(the_workload(world), "Admitted") == "True"
    assert "calculator-trainer-1" in world.there("Job")
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    assert world.status()["phase"] == "Suspended"
    assert world.there("Job") == world.there("Workload") == set()


async def test_kueues_words_are_cut_to_what_a_condition_holds() -> None:
    world = await queued()
    tell(world, entry("QuotaReserved", "False", "Pending", "no flavor fits; " * 2000))
    await world.settle()
    for said in (world.status(), *world.status()["conditions"]):
        assert len(said["message"]) <= 4096
    assert "no flavor fits" in next(c for c in world.status()["conditions"] if c["type"] == "Admitted")["message"]


async def test_a_priority_class_is_looked_up_without_a_queue_too() -> None:
    """Each pod that names one that is not there is refused, and nothing comes."""
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run(scheduling={"priorityClassName": "hihg"}))
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "ReferenceNotFound")
    assert "spec.scheduling.priorityClassName: there is no PriorityClass hihg" in world.status()["message"]


async def test_a_queue_that_is_not_there_is_named() -> None:
    world = World().with_kueue()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run(**QUEUED))
    await world.settle()
    assert "spec.scheduling.queueName: there is no LocalQueue gpus" in world.status()["message"]


async def test_a_cluster_without_kueue_or_with_an_old_one_is_told_apart_from_a_missing_queue() -> None:
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run(**QUEUED))
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "ReferenceNotFound")
    assert world.status()["message"] == (
        "spec.scheduling.queueName: found gpus, and the cluster does not serve kueue.x-k8s.io/v1beta2, the API of "
        "Kueue; install Kueue 0.15 or later (tested with 0.17), or remove the field"
    )


async def test_a_rollout_with_a_job_of_its_own_is_counted_too() -> None:
    world = World().with_kueue()
    world.cluster.put(storage_secret())
    world.cluster.put(pool(isolation="Job", replicas=3))
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpus"}}
    world.cluster.put(queue | {"metadata": {"name": "gpus", "namespace": NAMESPACE}})
    world.cluster.put(run(**QUEUED))
    await world.settle()
    assert {item["name"]: item["count"] for item in the_workload(world)["spec"]["podSets"]}["rollout"] == 3
    assert KINDS["Workload"].ref(NAMESPACE, "calculator") in world.cluster.objects


async def test_a_task_gets_no_more_than_its_queue_has_set_aside() -> None:
    """What was admitted counts what the template asks for: a row could have any multiple beside the quota."""
    world = World().with_kueue()
    world.cluster.put(storage_secret())
    world.cluster.put(pool(isolation="Job", replicas=3, perTask={"resourcesField": "resources"}))
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gpus"}}
    world.cluster.put(queue | {"metadata": {"name": "gpus", "namespace": NAMESPACE}})
    world.cluster.put(run(**QUEUED))
    await world.settle()
    admit(world)
    await world.settle()
    amounts = {"a": {"requests": {"cpu": "100m"}}, "b": {"requests": {"cpu": "64"}}, "c": None}
    world.trainers.says = report()
    world.trainers.wants = tuple(
        WantedRollout(name, 1, "credential", resources=asked) for name, asked in amounts.items()
    )
    await world.settle()
    (lost,) = world.trainers.told_lost
    assert (lost.rollout, lost.outcome) == ("b", CLASS_INVALID_TASK)
    assert "found cpu 64, and the queue of the run has set 250m aside for each rollout; raise it" in lost.message
    assert len([name for name in world.there("Job") if "trainer" not in name]) == 2
