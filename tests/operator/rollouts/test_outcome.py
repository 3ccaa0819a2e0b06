"""States of Jobs and pods as clusters have them, and what the queue is told of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator.cluster.trimmed import trimmed
from kitestring_operator.observed import LostRollout, Manifest
from kitestring_operator.rollouts import outcome, rollout_job
from kitestring_operator.rollouts.rollout_jobs import START_SECONDS
from tests.operator.rollouts.rendering import WANTED, of_case

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)

INFRASTRUCTURE = names.CLASS_INFRASTRUCTURE
AGENT_FAILED = names.CLASS_AGENT_FAILED
TIMED_OUT = names.CLASS_TIMED_OUT
INVALID_TASK = names.CLASS_INVALID_TASK


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: str = "True", *, seconds_ago: float = 10, **more: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "lastTransitionTime": ago(seconds_ago), "lastProbeTime": None, **more}


def ended(code: int, reason: str = "Error", *, started: float = 100, **more: str) -> dict[str, Any]:
    state = {"exitCode": code, "reason": reason, "startedAt": ago(started), "finishedAt": ago(10), "containerID": "c"}
    return {"terminated": state | more}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


RUNNING = {"running": {"startedAt": ago(100)}}
DONE = ended(0, "Completed")
INITIALIZING = waiting("PodInitializing")


def container(name: str, state: dict[str, Any], last: dict[str, Any] | None = None, image: str = "image:1") -> Manifest:
    return {
        "name": name,
        "image": image,
        "imageID": "",
        "ready": "running" in state,
        "restartCount": int(last is not None),
        "state": state,
        "lastState": last or {},
    }


def scheduled(seconds_ago: float = 100) -> dict[str, Any]:
    return condition("PodScheduled", seconds_ago=seconds_ago)


def pod(
    phase: str,
    *,
    agent: Manifest | dict[str, Any] = RUNNING,
    worker: Manifest | dict[str, Any] = RUNNING,
    init: tuple[Manifest, ...] = (),
    conditions: tuple[dict[str, Any], ...] = (),
    deleted: float | None = None,
    node: str | None = "node-1",
    placed: float = 100,
    **status: str,
) -> Manifest:
    """`deleted`: seconds since its grace period ended (negative: it has so many left)."""
    metadata = {"name": "sums-r-x-2-abcde", "namespace": "team-a", "uid": "p", "creationTimestamp": ago(placed + 1)}
    if deleted is not None:
        metadata["deletionTimestamp"] = ago(deleted)
    of_agent = agent if "name" in agent else container("agent", agent)
    of_worker = worker if "name" in worker else container("worker", worker)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [], "initContainers": []} | ({"nodeName": node} if node else {}),
        "status": {
            "phase": phase,
            "conditions": [*([scheduled(placed)] if node else []), *conditions],
            "initContainerStatuses": [*init, container("launcher", DONE), of_worker],
            "containerStatuses": [of_agent],
            **status,
        },
    }


def job(*conditions: dict[str, Any], image: str | None = WANTED.image) -> Manifest:
    wanted = WANTED if image == WANTED.image else type(WANTED)(WANTED.rollout, WANTED.number, WANTED.credential)
    made = rollout_job(of_case("job"), wanted)[1]
    made["metadata"]["uid"] = "j"
    return made | {"status": {"conditions": list(conditions), "startTime": ago(100)}}


def had_pod(made: Manifest) -> Manifest:
    return made | {"status": made["status"] | {"failed": 1}}


FAILED = condition("Failed", reason="BackoffLimitExceeded", message="Job has reached the specified backoff limit")
COMPLETE = condition("Complete", reason="CompletionsReached", message="Reached expected number of succeeded pods")
LATE = condition("Failed", reason="DeadlineExceeded", message="Job was active longer than specified deadline")
TARGET = LATE | {"type": "FailureTarget"}


def disrupted(reason: str, message: str) -> dict[str, Any]:
    return condition("DisruptionTarget", reason=reason, message=message)


@dataclass(frozen=True)
class Case:
    """`expected` is None, or a class; `says` are words of the message."""

    what: str
    job: Manifest
    pods: tuple[Manifest, ...]
    expected: str | None
    says: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


MEMORY_PRESSURE = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 51212Ki. Container agent was using "
    "3Gi, request is 256Mi, has larger consumption of memory. "
)
PULL = 'Back-off pulling image "registry.example/tasks/3:1": ErrImagePull: failed to resolve reference: not found'
START = 'failed to create containerd task: runc create failed: exec: "/kitestring/bin/launcher": exec format error'

CASES = (
    # --- nothing to tell ---
    Case("complete", job(COMPLETE), (pod("Succeeded", agent=DONE, worker=DONE),), None),
    Case("complete and its pod gone", job(COMPLETE), (), None),
    Case("succeeded, the Job not yet", job(), (pod("Succeeded", agent=DONE, worker=DONE),), None),
    Case("runs", job(), (pod("Running"),), None),
    Case("made just now", job(), (), None),
    Case("pulls for a while", job(), (pod("Pending", agent=waiting("ImagePullBackOff", PULL), placed=30),), None),
    Case("starts", job(), (pod("Pending", agent=INITIALIZING, placed=400),), None),
    Case(
        "drains",
        job(),
        (pod("Running", deleted=-500, conditions=(disrupted("EvictionByEvictionAPI", "Eviction API: evicting"),)),),
        None,
    ),
    Case("drains after its deadline", job(TARGET), (pod("Running", deleted=-500),), None),
    Case(
        "waits for a node for a while",
        job(),
        (
            pod(
                "Pending",
                node=None,
                placed=100,
                conditions=(condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes"),),
            ),
        ),
        None,
    ),
    # --- disruptions ---
    Case(
        "evicted by its node for memory",
        job(FAILED),
        (
            pod(
                "Failed",
                reason="Evicted",
                message=MEMORY_PRESSURE,
                agent=ended(137),
                conditions=(disrupted("TerminationByKubelet", MEMORY_PRESSURE),),
            ),
        ),
        INFRASTRUCTURE,
        ("pod sums-r-x-2-abcde on node node-1 was evicted: The node was low on resource: memory",),
    ),
    Case(
        "evicted because the agent filled its scratch folder",
        job(FAILED),
        (
            pod(
                "Failed",
                reason="Evicted",
                message='Usage of EmptyDir volume "kitestring-scratch" exceeds the limit "8Gi". ',
                agent=ended(137),
            ),
        ),
        AGENT_FAILED,
        ("wrote more than its pod may hold", "kitestring-scratch"),
    ),
    Case(
        "evicted because the agent filled its root",
        job(FAILED),
        (
            pod(
                "Failed", reason="Evicted", message='Container agent exceeded its local ephemeral storage limit "1Gi". '
            ),
        ),
        AGENT_FAILED,
    ),
    Case(
        "evicted because another volume is full",
        job(FAILED),
        (pod("Failed", reason="Evicted", message='Usage of EmptyDir volume "cache" exceeds the limit "8Gi". '),),
        INFRASTRUCTURE,
    ),
    Case(
        "drained node",
        job(FAILED),
        (
            pod(
                "Failed",
                agent=ended(143),
                worker=DONE,
                deleted=-100,
                conditions=(disrupted("EvictionByEvictionAPI", "Eviction API: evicting"),),
            ),
        ),
        INFRASTRUCTURE,
        ("was evicted, as when a node is drained",),
    ),
    Case(
        "preempted",
        job(FAILED),
        (
            pod(
                "Failed",
                agent=ended(143),
                conditions=(
                    disrupted(
                        "PreemptionByScheduler",
                        "default-scheduler: preempting to accommodate a higher priority pod",
                    ),
                ),
            ),
        ),
        INFRASTRUCTURE,
        ("made way for a pod of higher priority",),
    ),
    Case(
        "node shut down",
        job(FAILED),
        (
            pod(
                "Failed",
                reason="Terminated",
                message="Pod was terminated in response to imminent node shutdown.",
                agent=ended(143),
                conditions=(disrupted("TerminationByKubelet", "Pod was terminated"),),
            ),
        ),
        INFRASTRUCTURE,
        ("was on a node that shut down: Pod was terminated in response",),
    ),
    Case(
        "node gone",
        job(FAILED),
        (pod("Failed", conditions=(disrupted("DeletionByPodGC", "PodGC: node no longer exists"),)),),
        INFRASTRUCTURE,
        ("its node is gone",),
    ),
    Case(
        "node that does not answer",
        job(),
        (
            pod(
                "Running",
                deleted=300,
                conditions=(
                    disrupted("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"),
                    condition("Ready", "False", reason="NodeNotReady"),
                ),
            ),
        ),
        INFRASTRUCTURE,
        ("on node node-1 was deleted because its node does not answer", "has not ended since"),
    ),
    Case(
        "not taken by its node",
        job(FAILED),
        (
            pod(
                "Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu, requested: 500, used: 1900"
            ),
        ),
        INFRASTRUCTURE,
        ("was not run by its node (OutOfcpu)", "requested: 500"),
    ),
    Case(
        "deleted by hand", job(FAILED), (pod("Failed", agent=ended(143), deleted=-1),), INFRASTRUCTURE, ("told to end",)
    ),
    Case("pod gone", had_pod(job(FAILED)), (), INFRASTRUCTURE, ("its pod is gone (BackoffLimitExceeded: Job has",)),
    Case("never a pod", job(LATE), (), INFRASTRUCTURE, ("never had a pod (DeadlineExceeded: Job was active", "events")),
    # --- containers ---
    Case(
        "agent out of memory",
        job(FAILED),
        (pod("Failed", agent=ended(137, "OOMKilled"), worker=DONE),),
        AGENT_FAILED,
        ("the agent's container ran out of memory",),
    ),
    Case(
        "worker out of memory, started again",
        job(FAILED),
        (pod("Failed", agent=ended(3), worker=container("worker", ended(143), ended(137, "OOMKilled"))),),
        INFRASTRUCTURE,
        ("the worker of pod", "ran out of memory"),
    ),
    Case(
        "worker crashed",
        job(FAILED),
        (
            pod(
                "Failed",
                agent=ended(3),
                worker=container("worker", DONE, ended(1, message="Traceback …\nKeyError: 'lease'\n")),
            ),
        ),
        INFRASTRUCTURE,
        ("lost the worker beside it, which ended with 1: Traceback … KeyError: 'lease'",),
    ),
    Case(
        "both out of memory",
        job(FAILED),
        (pod("Failed", agent=ended(137, "OOMKilled"), worker=ended(137, "OOMKilled")),),
        INFRASTRUCTURE,
    ),
    Case("launcher ended", job(FAILED), (pod("Failed", agent=ended(139)),), INFRASTRUCTURE, ("launcher", "139")),
    Case(
        "launcher that got no thread",
        job(FAILED),
        (pod("Failed", agent=ended(2, message="runtime: failed to create new OS thread"), worker=DONE),),
        AGENT_FAILED,
        ("launcher", "ended with 2: runtime: failed to create", "while the agent ran"),
    ),
    Case(
        "launcher killed",
        job(FAILED),
        (pod("Failed", agent=ended(137), worker=DONE),),
        AGENT_FAILED,
        ("launcher", "ended with 137 while the agent ran"),
    ),
    Case(
        "launcher killed with its pod",
        job(FAILED),
        (pod("Failed", agent=ended(137), worker=ended(137), deleted=-1),),
        INFRASTRUCTURE,
        ("launcher", "ended with 137"),
    ),
    Case(
        "launcher killed with its node",
        job(FAILED),
        (pod("Failed", agent=ended(137), conditions=(disrupted("DeletionByTaintManager", "deleting"),)),),
        INFRASTRUCTURE,
        ("its node does not answer",),
    ),
    Case("launcher misused", job(FAILED), (pod("Failed", agent=ended(64)),), INFRASTRUCTURE, ("its arguments",)),
    Case(
        "lost from sight",
        job(FAILED),
        (pod("Failed", agent=ended(137, "ContainerStatusUnknown", message="The container could not be located")),),
        INFRASTRUCTURE,
        ("137 (ContainerStatusUnknown)",),
    ),
    Case(
        "image of another machine",
        job(FAILED),
        (pod("Failed", agent=ended(128, "StartError", message=START)),),
        INFRASTRUCTURE,
        ("could not be started", "exec format error"),
    ),
    Case(
        "init container of the user's",
        job(FAILED),
        (pod("Failed", agent=INITIALIZING, init=(container("data", ended(1, message="no such bucket")),)),),
        INFRASTRUCTURE,
        ("before its agent was started", "container data ended with 1: no such bucket"),
    ),
    Case(
        "another container of the user's",
        job(FAILED),
        (pod("Failed", agent=DONE, init=(container("proxy", ended(2)),)),),
        INFRASTRUCTURE,
        ("container proxy ended with 2",),
    ),
    # --- what never starts ---
    Case(
        "image that cannot be pulled",
        job(),
        (
            pod(
                "Pending",
                agent=container("agent", waiting("ImagePullBackOff", PULL), image="registry.example/tasks/3:1"),
            ),
        ),
        INFRASTRUCTURE,
        ("cannot have its image registry.example/tasks/3:1: ImagePullBackOff", "not found"),
    ),
    Case(
        "image of ours that cannot be pulled",
        job(),
        (pod("Pending", agent=INITIALIZING, worker=waiting("ErrImagePull", "401 Unauthorized")),),
        INFRASTRUCTURE,
        ("container worker", "401 Unauthorized"),
    ),
    Case(
        "name of no image, the task's",
        job(),
        (pod("Pending", agent=container("agent", waiting("InvalidImageName"), image="A B"), placed=1),),
        INVALID_TASK,
        ("the image that the task asks for has no valid name: registry.example/tasks/3:1",),
    ),
    Case(
        "name of no image, the pool's",
        job(image=None),
        (pod("Pending", agent=container("agent", waiting("InvalidImageName"), image="A B"), placed=1),),
        INFRASTRUCTURE,
        ("A B is no name of an image",),
    ),
    Case(
        "image that must be there",
        job(),
        (pod("Pending", agent=waiting("ErrImageNeverPull"), placed=1),),
        INFRASTRUCTURE,
    ),
    Case(
        "missing Secret",
        job(),
        (pod("Pending", agent=waiting("CreateContainerConfigError", 'secret "tools" not found')),),
        INFRASTRUCTURE,
        ('CreateContainerConfigError: secret "tools" not found',),
    ),
    Case(
        "worker that ends again and again",
        job(),
        (
            pod(
                "Pending",
                agent=INITIALIZING,
                worker=container(
                    "worker",
                    waiting("CrashLoopBackOff", "back-off 20s"),
                    ended(2, message="worker: limits: unknown field"),
                ),
            ),
        ),
        INFRASTRUCTURE,
        ("ended with 2: worker: limits: unknown field, again and again",),
    ),
    Case(
        "a sidecar of the user's that ends again and again beside an agent that works",
        job(),
        (
            pod(
                "Running",
                init=(container("proxy", waiting("CrashLoopBackOff", "back-off 20s"), ended(0, "Completed")),),
            ),
        ),
        None,
    ),
    Case(
        "no node",
        job(),
        (
            pod(
                "Pending",
                node=None,
                placed=700,
                conditions=(
                    condition(
                        "PodScheduled",
                        "False",
                        seconds_ago=5,
                        reason="Unschedulable",
                        message="0/3 nodes are available: 3 Insufficient memory.",
                    ),
                ),
            ),
        ),
        INFRASTRUCTURE,
        ("has no node: 0/3 nodes are available: 3 Insufficient memory.",),
    ),
    # --- too late ---
    Case(
        "agent that does not end",
        job(LATE),
        (pod("Failed", agent=ended(137, started=START_SECONDS + 640), deleted=-1),),
        TIMED_OUT,
        ("had not ended after 600 s",),
    ),
    Case(
        "agent that does not end, the Job not yet failed",
        job(TARGET),
        (pod("Failed", agent=ended(137, started=START_SECONDS + 640), deleted=-1),),
        TIMED_OUT,
    ),
    Case("started too late", job(LATE), (pod("Failed", agent=ended(143, started=200)),), INFRASTRUCTURE, ("so late",)),
    Case(
        "never started",
        job(LATE),
        (pod("Failed", agent=waiting("ImagePullBackOff", PULL)),),
        INFRASTRUCTURE,
        ("did not start in time", "ImagePullBackOff"),
    ),
    Case("late and gone", job(LATE), (), INFRASTRUCTURE, ("DeadlineExceeded",)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_queue_is_told(case: Case) -> None:
    # as the operator keeps them in memory
    found = outcome(trimmed(case.job), [trimmed(one) for one in case.pods], NOW)
    if case.expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.rollout, found.number, found.outcome) == (WANTED.rollout, WANTED.number, case.expected), found
    for words in case.says:
        assert words in found.message
    assert "\n" not in found.message


def test_of_several_pods_the_last_one_counts() -> None:
    old = pod("Failed", agent=ended(143), placed=500)
    assert outcome(job(), [pod("Running"), old], NOW) is None
    assert isinstance(outcome(job(), [pod("Failed", agent=ended(143)), old], NOW), LostRollout)


def test_messages_are_bounded() -> None:
    found = outcome(job(FAILED), [pod("Failed", reason="Evicted", message="x" * 100_000)], NOW)
    assert found is not None
    assert len(found.message) < 2001
