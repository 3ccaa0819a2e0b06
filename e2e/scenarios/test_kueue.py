"""Runs in a queue of the real Kueue: admitted whole or not at all, preempted, and let go of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import agents, barrier, runs
from e2e.harness.api import Api, Object, condition, is_true
from e2e.harness.audit import audited
from e2e.harness.images import Images
from e2e.harness.kinds import (
    CLUSTER_QUEUE,
    DEFINITION,
    JOB,
    LEASE,
    LOCAL_QUEUE,
    NODE,
    POD,
    POD_PRIORITY,
    RESOURCE_FLAVOR,
    RUN,
    WORKLOAD,
    Kind,
)
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import LABEL, Namespace
from e2e.harness.release import Release
from e2e.node import kube, kueue
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.full

KEEP = bool(os.environ.get("E2E_KEEP"))
PARTS = 5
"""Pods of a run here: trainer, policy server, gateway, collector, worker."""
QUEUE = "queue"
"""Name of the LocalQueue."""
START_SECONDS = 90.0
"""Until the first agents of a run are in the midst of their rollouts."""
STOP_SECONDS = 60.0
"""Until a preempted run holds no pod."""
WORD_SECONDS = 20.0
"""Until a word of Kueue is in the status of a run, or the other way round."""
END_SECONDS = 90.0


@pytest.fixture(scope="module", autouse=True)
def installed(api: Api, release: Release) -> Iterator[None]:
    """Kueue. Where it was not there, it comes and goes while operators run, which must notice."""
    if api.get(DEFINITION, f"{CLUSTER_QUEUE.plural}.kueue.x-k8s.io") is not None:
        yield
        return
    if kube.external_kubeconfig() is not None:
        pytest.skip("needs Kueue")
    try:
        with next_operator(api, release):
            kueue.install()
        yield
    finally:
        if not KEEP:
            with next_operator(api, release):
                kueue.remove()


@contextmanager
def next_operator(api: Api, release: Release) -> Iterator[None]:
    """Do what makes the operator that acts give way to another, and wait for that one: it watches other kinds."""

    def terms(leases: Iterable[Object]) -> int:
        return sum(int(lease["spec"].get("leaseTransitions") or 0) for lease in leases)

    before = terms(api.listed(LEASE, release.namespace))
    yield
    what = "the next operator"
    api.until(LEASE, lambda leases: terms(leases.values()) > before, what, seconds=120, namespace=release.namespace)


@dataclass(frozen=True)
class Queue:
    """A LocalQueue of a namespace, with a quota of its own in pods."""

    api: Api
    name: str
    """Of ClusterQueue and ResourceFlavor, and the beginning of the names of priority classes."""

    def open(self, namespace: Namespace, pods: int, *, local: str = QUEUE, **flavor: Any) -> None:
        """Make it, or change its quota; `flavor` is the spec of the only flavor, `local` the LocalQueue's name."""
        amounts = [{"name": name, "nominalQuota": amount} for name, amount in (("cpu", 100), ("memory", "1Ti"))]
        quota = {"name": self.name, "resources": [*amounts, {"name": "pods", "nominalQuota": pods}]}
        cluster_queue = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": ["cpu", "memory", "pods"], "flavors": [quota]}],
        }
        self._apply(RESOURCE_FLAVOR, spec=flavor)
        self._apply(CLUSTER_QUEUE, spec=cluster_queue)
        made = {"apiVersion": LOCAL_QUEUE.api_version, "kind": LOCAL_QUEUE.name, "metadata": {"name": local}}
        namespace.apply(made | {"spec": {"clusterQueue": self.name}})
        namespace.until_condition(LOCAL_QUEUE, local, "Active", seconds=WORD_SECONDS)

    def priority(self, level: str, value: int) -> str:
        """Name of a new priority class, which matters to Kueue only."""
        self._apply(POD_PRIORITY, f"-{level}", value=value, preemptionPolicy="Never")
        return f"{self.name}-{level}"

    def close(self) -> None:
        """Take everything away; raises NotYet where a Workload still holds quota."""
        for kind in (CLUSTER_QUEUE, RESOURCE_FLAVOR, POD_PRIORITY):
            made = [item["metadata"]["name"] for item in self.api.listed(kind, selector=f"{LABEL}={self.name}")]
            for name in made:
                self.api.delete(kind, name)
                self.api.until_gone(kind, None, seconds=30, name=name)

    def _apply(self, kind: Kind, suffix: str = "", **fields: Any) -> None:
        metadata = {"name": self.name + suffix, "labels": {LABEL: self.name}}
        self.api.apply({"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata} | fields)


@pytest.fixture
def queue(request: pytest.FixtureRequest, api: Api) -> Iterator[Queue]:
    """The queue of a scenario. Named before `namespace`, so that it goes after it: no Workload may be left."""
    made = Queue(api, "e2e-" + request.node.name.removeprefix("test_").replace("_", "-")[:40])
    made.close()  # of a session that was interrupted
    yield made
    if not KEEP:
        made.close()


def test_queue_admits_runs_as_a_whole(queue: Queue, images: Images, namespace: Namespace) -> None:
    """With quota for all pods but one of a second run, it waits without any; it goes on when the first has ended."""
    node = namespace.api.listed(NODE, selector="!node-role.kubernetes.io/control-plane")[-1]["metadata"]["name"]
    queue.open(namespace, 2 * PARTS - 1, nodeLabels={"kubernetes.io/hostname": node})
    namespace.apply(stopping_pool(images), queued("one"))
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 2, seconds=START_SECONDS)
        assert is_true(namespace.get(RUN, "one"), "Admitted")
        pods = namespace.pods(f"{names.LABEL_RUN}=one")
        assert len(pods) == PARTS
        assert {pod["spec"]["nodeName"] for pod in pods} == {node}, "pods are where their flavor is"

        namespace.apply(queued("two"))
        until_waiting(namespace, "two")
        assert_holds_nothing(namespace, "two")
        gate.open("step-1")
        one = runs.until_finished(namespace, "one", seconds=END_SECONDS)
        two = runs.until_finished(namespace, "two", seconds=END_SECONDS)
    runs.assert_succeeded(one)
    runs.assert_succeeded(two)
    assert two["status"]["startTime"] >= one["status"]["completionTime"]
    for name in ("one", "two"):
        namespace.until_condition(WORKLOAD, name, "Finished", seconds=WORD_SECONDS)


def test_preempted_run_goes_on_where_it_was(
    queue: Queue, images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """A run of higher priority takes the quota in mid-step: all pods of the lower one end, and no rollout is lost."""
    queue.open(namespace, PARTS)
    low, high = queue.priority("low", 1000), queue.priority("high", 2000)
    namespace.apply(stopping_pool(images), runs.pool(images, "quick"), queued("low", priority=low, steps=2))
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 2, seconds=START_SECONDS)
        gate.open("step-1")
        cut_off = {said["rollout"]: said["attempt"] for said in gate.until("step-2", 2, seconds=START_SECONDS)}
        before = namespace.get(RUN, "low")
        ledger = Ledger(store, before)
        planned, done = ledger.plan(2), ledger.commit(1)

        namespace.apply(queued("high", pool="quick", priority=high))
        evicted = runs.until_phase(namespace, "low", Phase.QUEUED, seconds=STOP_SECONDS)
        namespace.until_gone(POD, seconds=5, selector=f"{names.LABEL_RUN}=low")  # they have ended
        assert_holds_nothing(namespace, "low")
        assert is_true(evicted, "Suspended") and condition(evicted, "Admitted")["status"] == "False"
        assert evicted["status"]["reason"] == names.REASON_PREEMPTED
        assert "preempted" in evicted["status"]["message"].lower(), "it says what Kueue says"
        said = [event["message"] for event in namespace.events_of(RUN, "low")]
        assert any(message.startswith(f"{Phase.SUSPENDING}: ") for message in said), said

        gate.open("step-2")
        over = runs.until_finished(namespace, "high", seconds=END_SECONDS)
        runs.assert_succeeded(over)
        assert over["status"]["startTime"] >= condition(evicted, "Suspended")["lastTransitionTime"]
        run = runs.until_finished(namespace, "low", seconds=END_SECONDS)
    runs.assert_succeeded(run)
    assert run["status"]["startTime"] == before["status"]["startTime"]
    assert (run["status"]["step"], run["status"]["restarts"]) == (2, 0), "to be preempted is no restart that counts"
    assert not is_true(run, "Suspended") and is_true(run, "Admitted")
    assert audited(namespace.kubectl, run, tmp_path, 2) == {names.CLASS_SUCCEEDED: 2 * ROLLOUTS}
    assert (ledger.plan(2), ledger.commit(1)) == (planned, done), "what was known stays"
    for rollout in ledger.commit(2):
        assert rollout["attempt"] != cut_off.get(rollout["rollout"]), "its agent was ended"


def test_raised_quota_admits_the_next(queue: Queue, images: Images, namespace: Namespace) -> None:
    """While one run is in mid-step the queue gets room for another; more workers than were admitted wait."""
    queue.open(namespace, PARTS)
    namespace.apply(stopping_pool(images), queued("one"))
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 2, seconds=START_SECONDS)
        namespace.apply(queued("two"))
        until_waiting(namespace, "two")
        assert_holds_nothing(namespace, "two")
        queue.open(namespace, 2 * PARTS)
        gate.until("step-1", 4, seconds=START_SECONDS)
        assert is_true(namespace.get(RUN, "one"), "Admitted") and is_true(namespace.get(RUN, "two"), "Admitted")

        runs.scale(namespace, "pool", 2)
        for name in ("one", "two"):
            namespace.until_object(
                RUN,
                name,
                lambda run: "1 of 2 workers" in condition(run, "Admitted")["message"],
                f"{name} says that workers wait",
                seconds=WORD_SECONDS,
            )
            assert len(namespace.pods(f"{names.LABEL_RUN}={name}")) == PARTS
        gate.open("step-1")
        for name in ("one", "two"):
            runs.assert_succeeded(runs.until_finished(namespace, name, seconds=END_SECONDS))


def test_queued_run_leaves_the_queue(queue: Queue, images: Images, namespace: Namespace) -> None:
    """Suspended by its user a waiting run leaves the queue; resumed it is back; deleted it leaves no Workload."""
    queue.open(namespace, PARTS - 1)
    namespace.apply(runs.pool(images), queued("run"))
    until_waiting(namespace, "run")

    namespace.kubectl("patch", "trainingrun/run", "--type=merge", "--patch", '{"spec": {"suspend": true}}')
    suspended = runs.until_phase(namespace, "run", Phase.SUSPENDED, seconds=WORD_SECONDS)
    assert suspended["status"]["reason"] == names.REASON_SUSPEND_REQUESTED
    namespace.until_gone(WORKLOAD, seconds=WORD_SECONDS)

    namespace.kubectl("patch", "trainingrun/run", "--type=merge", "--patch", '{"spec": {"suspend": false}}')
    until_waiting(namespace, "run")
    assert_holds_nothing(namespace, "run")
    assert "startTime" not in namespace.get(RUN, "run")["status"]

    namespace.kubectl("delete", "trainingrun/run")
    namespace.until_gone(WORKLOAD, seconds=WORD_SECONDS)
    assert namespace.objects_of_run("run") == {}


def test_queue_named_default_is_told(queue: Queue, images: Images, namespace: Namespace) -> None:
    """Kueue puts all that names no queue into it, and so holds a run back: the status says so, and its remedy helps."""
    queue.open(namespace, 0, local="default")
    namespace.apply(runs.pool(images), runs.collecting("run", steps=1))

    def is_told(status: Object) -> bool:
        return status.get("reason") == names.REASON_SUSPENDED_BY_OTHERS

    told = runs.until_status(namespace, "run", is_told, "what holds the run back", seconds=WORD_SECONDS)
    assert told["status"]["phase"] == Phase.STARTING
    assert "Kueue has put it into queue default" in told["status"]["message"]
    assert condition(told, "TrainerReady")["message"] == told["status"]["message"]

    namespace.delete(LOCAL_QUEUE, "default")
    namespace.until_gone(LOCAL_QUEUE, seconds=WORD_SECONDS)
    namespace.patch(RUN, "run", {"spec": {"suspend": True}})
    runs.until_phase(namespace, "run", Phase.SUSPENDED, seconds=STOP_SECONDS)
    namespace.patch(RUN, "run", {"spec": {"suspend": False}})
    runs.assert_succeeded(runs.until_finished(namespace, "run", seconds=START_SECONDS))


ROLLOUTS = 3
"""Of a step; all but the first stop at the barrier."""


def queued(name: str, *, pool: str = "pool", priority: str | None = None, steps: int = 1) -> Object:
    """A run of the queue."""
    scheduling = {"queueName": QUEUE} | ({} if priority is None else {"priorityClassName": priority})
    rollouts = {"poolRef": {"name": pool}, "tasksPerStep": 1, "groupSize": ROLLOUTS}
    return runs.collecting(name, steps=steps, rollouts=rollouts, scheduling=scheduling)


def stopping_pool(images: Images) -> Object:
    """A pool of agents that stop at the barrier; the first of each group does not."""
    made = runs.pool(images, script=agents.script("stopping"), network={"egress": [barrier.EGRESS]})
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def until_waiting(namespace: Namespace, name: str) -> None:
    """Return once the run waits, and says in Kueue's own words for what."""

    def waits(run: Object) -> bool:
        status = run.get("status", {})
        return status.get("phase") == Phase.QUEUED and "insufficient" in status.get("message", "")

    run = namespace.until_object(RUN, name, waits, f"run {name} in the queue", seconds=WORD_SECONDS)
    assert run["status"]["reason"] == names.REASON_WAITING_FOR_QUEUE
    admitted = condition(run, "Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", names.REASON_WAITING_FOR_QUEUE)
    assert "insufficient" in admitted["message"] and "pods" in admitted["message"], admitted


def assert_holds_nothing(namespace: Namespace, name: str) -> None:
    """Neither a pod, nor what makes one."""
    held = namespace.objects_of_run(name)
    jobs = [item for item in namespace.listed(JOB, f"{names.LABEL_RUN}={name}") if item["status"].get("active")]
    assert not jobs and not {"Pod", "Deployment", "StatefulSet"} & held.keys(), held
