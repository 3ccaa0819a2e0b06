"""What the cluster says of an executor that ended, or never starts: whose fault, and in which words. Pure.

The queue is told of each Job that ends otherwise than well; if its worker had reported a finish, that counts and this
does not. Of a doubt the infrastructure has the benefit: such an attempt is made again, and never scored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from kitestring_api import names
from kitestring_api.v1alpha1.pod_template import AGENT_CONTAINER, WORKER_CONTAINER
from kitestring_operator.observed import LostRollout, Manifest
from kitestring_operator.pods import (
    CONFIG_REASONS,
    IMAGE_REASONS,
    condition_entry,
    conditions_that_hold,
    is_live,
    parse_time,
)
from kitestring_operator.rollouts.pod import SCRATCH_VOLUME, TEMPORARY_VOLUME
from kitestring_operator.rollouts.rollout_jobs import attempt_seconds, rollout_of

STUCK_SECONDS: Final = 60
"""A container that waits so long for its image, or for what it refers to, will wait for ever: the kubelet has tried
three times or more by then."""
UNPLACED_SECONDS: Final = 600
"""A pod that waits so long for a node: time for an autoscaler to bring one."""

MESSAGE_LENGTH: Final = 2000
"""Of at most 4096 characters that the queue takes."""

_AGENT_FILLS_DISK: Final = re.compile(
    rf'EmptyDir volume "({SCRATCH_VOLUME}|{TEMPORARY_VOLUME})" exceeds'
    rf"|[Cc]ontainer {AGENT_CONTAINER} exceeded its local ephemeral storage limit"
)
"""In the message of an eviction: the kubelet's words for an agent that wrote more than it may."""

_DISRUPTIONS: Final[Mapping[str, str]] = {
    "PreemptionByScheduler": "made way for a pod of higher priority",
    "DeletionByTaintManager": "was deleted because its node does not answer or is tainted",
    "EvictionByEvictionAPI": "was evicted, as when a node is drained",
    "DeletionByPodGC": "was deleted because its node is gone",
    "TerminationByKubelet": "was ended by its node",
}
_POD_REASONS: Final[Mapping[str, str]] = {
    "Evicted": "was evicted",
    "NodeLost": "was on a node that was lost",
    "NodeShutdown": "was on a node that shut down",
    "Shutdown": "was on a node that shut down",
    "Terminated": "was on a node that shut down",
    "Preempting": "made way for a critical pod",
    "DeadlineExceeded": "lasted longer than activeDeadlineSeconds of its template",
}
_WORKER_GONE: Final = 3
_LAUNCHER_ENDS: Final[Mapping[int, str]] = {
    _WORKER_GONE: "lost the worker beside it",
    64: "does not know its arguments",
    names.EXIT_STOPPED: "was told to end before its agent had ended",
}
"""By exit code (rollout/launcher/main.go)."""
_LAUNCHER_CRASHED: Final = 2
"""By its runtime, which got no thread or no memory."""
_LAUNCHER_KILLED: Final = 137

_ENDLESS: Final = IMAGE_REASONS | CONFIG_REASONS | {"CrashLoopBackOff"}
"""Why a container waits that will wait for ever."""


@dataclass(frozen=True, slots=True)
class _Fault:
    outcome: str
    message: str


def outcome(job: Manifest, pods: Sequence[Manifest], now: datetime) -> LostRollout | None:
    """What the queue is to be told of a Job of `rollout_job` and its pods; None: nothing (yet), it runs or went well.

    A Job of which something is told is over, also where Kubernetes would wait on.
    """
    fault = _fault(job, pods, now)
    if fault is None:
        return None
    rollout, number = rollout_of(job)
    return LostRollout(rollout, number, fault.outcome, fault.message[:MESSAGE_LENGTH])


def _fault(job: Manifest, pods: Sequence[Manifest], now: datetime) -> _Fault | None:
    pod = _newest(pods)
    held = conditions_that_hold(job)
    if "Complete" in held or (pod is None and "Failed" not in held):
        return None
    # FailureTarget comes first, with the same reason: Failed follows when the pod has ended
    failed = held.get("Failed") or held.get("FailureTarget") or {}
    if pod is None:
        return _infrastructure(_gone(job, failed))
    phase, is_late = (pod.get("status") or {}).get("phase"), failed.get("reason") == "DeadlineExceeded"
    if phase == "Succeeded":
        return None
    if phase == "Failed":
        return _late(job, pod, failed, now) if is_late else _ended(pod)
    if not is_live(pod, now):
        return _infrastructure(f"{_name(pod)} {_disruption(pod) or 'was deleted'} and has not ended since")
    # one that is being deleted drains: its worker may still say how the agent ended
    return None if "deletionTimestamp" in pod["metadata"] else _stuck(job, pod, now)


def _newest(pods: Sequence[Manifest]) -> Manifest | None:
    if len(pods) < 2:
        return pods[0] if pods else None
    return max(pods, key=lambda one: str(one["metadata"].get("creationTimestamp", "")))


def _infrastructure(message: str) -> _Fault:
    return _Fault(names.CLASS_INFRASTRUCTURE, message)


def _gone(job: Manifest, failed: Mapping[str, Any]) -> str:
    said = ": ".join(str(failed[key]) for key in ("reason", "message") if failed.get(key))
    name = job["metadata"]["name"]
    if not (job.get("status") or {}).get("failed"):
        return f"Job {name} failed and never had a pod ({said}); events of it say what refused one"
    return f"Job {name} failed and its pod is gone ({said})"


# --- A pod that has ended -----------------------------------------------------------------------------------------


def _ended(pod: Manifest) -> _Fault:
    status = pod["status"]
    name, reason, said = _name(pod), str(status.get("reason") or ""), _said(status.get("message"))
    if _AGENT_FILLS_DISK.search(said):
        return _Fault(names.CLASS_AGENT_FAILED, f"the agent wrote more than its pod may hold: {said}")
    if reason:
        # not among ours: what the kubelet says when it cannot take a pod (OutOfcpu, UnexpectedAdmissionError, …)
        return _infrastructure(
            f"{name} {_POD_REASONS.get(reason, f'was not run by its node ({reason})')}{_colon(said)}"
        )
    disruption = _disruption(pod)
    if disruption is not None:
        return _infrastructure(f"{name} {disruption}")
    return _by_containers(pod, name)


def _by_containers(pod: Manifest, name: str) -> _Fault:
    ends = dict(_terminations(pod))
    worker, agent = ends.get(WORKER_CONTAINER) or {}, ends.get(AGENT_CONTAINER)
    if worker.get("reason") == "OOMKilled":
        return _infrastructure(f"the worker of {name} ran out of memory")
    if agent is None:
        return _infrastructure(f"{name} failed before its agent was started{_colon(_others(ends))}")
    if agent.get("reason") == "OOMKilled":
        return _Fault(names.CLASS_AGENT_FAILED, "the agent's container ran out of memory and was killed")
    if _was_felled(agent) and "deletionTimestamp" not in pod["metadata"]:
        # in a pod that nobody ends this is the agent's doing: by what it takes from the launcher beside it
        return _Fault(names.CLASS_AGENT_FAILED, f"the launcher of {name} {_how(agent)} while the agent ran")
    return _infrastructure(_of_launcher(name, agent, worker) or f"{name} failed{_colon(_others(ends))}")


def _was_felled(launcher: Mapping[str, Any]) -> bool:
    return launcher.get("reason") == "Error" and launcher.get("exitCode") in (_LAUNCHER_CRASHED, _LAUNCHER_KILLED)


def _of_launcher(name: str, agent: Mapping[str, Any], worker: Mapping[str, Any]) -> str | None:
    """The agent's container runs the launcher: how else that ended says nothing of the agent. None: it ended well."""
    code = int(agent.get("exitCode", 0))
    if agent.get("reason") in ("StartError", "ContainerCannotRun"):
        return f"the launcher of {name} could not be started: {_said(agent.get('message'))}"
    if code in _LAUNCHER_ENDS:
        beside = f", which {_how(worker)}" if code == _WORKER_GONE and worker.get("exitCode") else ""
        return f"the launcher of {name} {_LAUNCHER_ENDS[code]}{beside}"
    return f"the launcher of {name} {_how(agent)}" if code else None


def _others(ends: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(f"container {container} {_how(end)}" for container, end in ends.items() if end.get("exitCode"))


def _how(end: Mapping[str, Any]) -> str:
    reason = str(end.get("reason") or "")
    known = "" if reason in ("", "Error", "Completed") else f" ({reason})"
    return f"ended with {end.get('exitCode')}{known}{_colon(_said(end.get('message')))}"


def _disruption(pod: Manifest) -> str | None:
    """Kubernetes' own word that it ended the pod for a reason that is not the pod's."""
    found = conditions_that_hold(pod).get("DisruptionTarget")
    if found is None:
        return None
    reason = str(found.get("reason") or "")
    return f"{_DISRUPTIONS.get(reason, f'was disrupted ({reason})')}{_colon(_said(found.get('message')))}"


# --- A Job that lasted too long -----------------------------------------------------------------------------------


def _late(job: Manifest, pod: Manifest, failed: Mapping[str, Any], now: datetime) -> _Fault:
    """The agent's fault only if it had all of its time: the deadline of a Job counts placing and pulling too."""
    end = parse_time(failed.get("lastTransitionTime")) or now
    seconds = attempt_seconds(job)
    begun = _agent_began(pod)
    if begun is not None and end - begun >= timedelta(seconds=seconds):
        return _Fault(names.CLASS_TIMED_OUT, f"the agent of {_name(pod)} had not ended after {seconds} s")
    if begun is not None:
        return _infrastructure(f"{_name(pod)} started so late that its agent had less than {seconds} s")
    why = _waits(pod) or _unplaced(pod)
    return _infrastructure(f"{_name(pod)} did not start in time{_colon(why or '')}")


def _agent_began(pod: Manifest) -> datetime | None:
    for status in _statuses(pod):
        if status["name"] == AGENT_CONTAINER:
            state = status.get("state") or {}
            begun = (state.get("running") or state.get("terminated") or {}).get("startedAt")
            return parse_time(begun)
    return None


# --- A pod that does not start ------------------------------------------------------------------------------------


def _stuck(job: Manifest, pod: Manifest, now: datetime) -> _Fault | None:
    waiting = _waiting_containers(pod)
    if (pod.get("spec") or {}).get("nodeName") and (not waiting or _agent_began(pod) is not None):
        return None  # an agent that works does so whatever a sidecar of the user's does beside it
    for status, wait in waiting:
        if wait.get("reason") == "InvalidImageName":
            return _invalid_image(job, pod, status)
        if wait.get("reason") == "ErrImageNeverPull":
            return _infrastructure(_waiting(pod, status, wait))
    since = _placed_at(pod)
    if since is None:
        waited = now - (parse_time(pod["metadata"].get("creationTimestamp")) or now)
        why = _unplaced(pod)
        return (
            _infrastructure(f"{_name(pod)} has no node: {why}") if why and waited > _seconds(UNPLACED_SECONDS) else None
        )
    why = _waits(pod)
    return _infrastructure(why) if why and now - since > _seconds(STUCK_SECONDS) else None


def _invalid_image(job: Manifest, pod: Manifest, status: Mapping[str, Any]) -> _Fault:
    asked = (job["metadata"].get("annotations") or {}).get(names.ANNOTATION_TASK_IMAGE)
    if status["name"] == AGENT_CONTAINER and asked is not None:
        return _Fault(names.CLASS_INVALID_TASK, f"the image that the task asks for has no valid name: {asked}")
    return _infrastructure(f"container {status['name']} of {_name(pod)}: {status.get('image')} is no name of an image")


def _waits(pod: Manifest) -> str | None:
    """What keeps a container that was placed from starting, if waiting does not mend it."""
    for status, wait in _waiting_containers(pod):
        if wait.get("reason") in _ENDLESS:
            return _waiting(pod, status, wait)
    return None


def _waiting(pod: Manifest, status: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    reason, container = waiting["reason"], f"container {status['name']} of {_name(pod)}"
    if reason in IMAGE_REASONS:
        return (
            f"{container} cannot have its image {status.get('image')}: {reason}{_colon(_said(waiting.get('message')))}"
        )
    if reason == "CrashLoopBackOff":
        return f"{container} {_how((status.get('lastState') or {}).get('terminated') or {})}, again and again"
    return f"{container} cannot be started: {reason}{_colon(_said(waiting.get('message')))}"


def _unplaced(pod: Manifest) -> str | None:
    entry = condition_entry(pod, "PodScheduled")
    if entry is None or entry.get("status") == "True":
        return None
    return _said(entry.get("message")) or str(entry.get("reason"))


def _placed_at(pod: Manifest) -> datetime | None:
    entry = condition_entry(pod, "PodScheduled")
    return None if entry is None or entry.get("status") != "True" else parse_time(entry.get("lastTransitionTime"))


# --- Reading ------------------------------------------------------------------------------------------------------


def _name(pod: Manifest) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    return f"pod {pod['metadata']['name']}" + (f" on node {node}" if node else "")


def _statuses(pod: Manifest) -> Sequence[Mapping[str, Any]]:
    status = pod.get("status") or {}
    return (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))


def _waiting_containers(pod: Manifest) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The status of each container that waits, and what it says of it."""
    found = []
    for status in _statuses(pod):
        state = status.get("state")
        if state and state.get("waiting") is not None:
            found.append((status, state["waiting"]))
    return found


def _terminations(pod: Manifest) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """How each container ended. A worker that was started again is known by its end before: that is what was lost."""
    for status in _statuses(pod):
        last = (status.get("lastState") or {}).get("terminated")
        now = (status.get("state") or {}).get("terminated")
        end = (last or now) if status["name"] == WORKER_CONTAINER else now
        if end:
            yield str(status["name"]), end


def _said(text: object) -> str:
    """A message of the cluster in one line, its end cut off where it is long."""
    line = " ".join(str(text or "").split())
    return line if len(line) <= 500 else f"{line[:499]}…"


def _colon(text: str) -> str:
    return f": {text}" if text else ""


def _seconds(number: int) -> timedelta:
    return timedelta(seconds=number)
