"""What the status of a pod says: whether it lives, why a container ended, what keeps it from starting. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from kitestring_api import names
from kitestring_operator.observed import Manifest

GIVE_UP_AFTER: Final = timedelta(seconds=120)
"""A pod that is still there so long after its grace period is on a node that does not answer: it counts as gone. What
it may still do is fenced by incarnations and leases."""

IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
"""Why a container waits when its image cannot be had."""
CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Why a container waits when what it refers to is missing, or cannot be started."""
_NEVER_RAN: Final = frozenset({"StartError", "ContainerCannotRun"})
"""Why a container has ended that was made and never ran."""


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """How a container ended. `message` is its termination message: data of a process, not to be trusted."""

    container: str
    exit_code: int
    reason: str
    message: str
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps a pod from starting."""

    pod: str
    message: str
    reason: str | None = None
    """One of names.REASON_*, where there is a word for it."""


def is_live(pod: Manifest, now: datetime) -> bool:
    """Whether a process of the pod may still run or come to run."""
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    deleted = parse_time(pod["metadata"].get("deletionTimestamp"))
    return deleted is None or now < deleted + GIVE_UP_AFTER


def is_ready(pod: Manifest) -> bool:
    """Whether the pod is ready and is not being deleted."""
    return "deletionTimestamp" not in pod["metadata"] and condition(pod, "Ready") == "True"


def condition(item: Manifest, kind: str) -> str | None:
    """Status of a condition of an object: True, False, Unknown, or None where it has none."""
    found = condition_entry(item, kind)
    return None if found is None else str(found.get("status"))


def condition_entry(item: Manifest, kind: str) -> Mapping[str, Any] | None:
    """A condition of an object."""
    status = item.get("status")
    if status:
        for entry in status.get("conditions") or ():
            if entry.get("type") == kind:
                found: Mapping[str, Any] = entry
                return found
    return None


def conditions_that_hold(item: Manifest) -> Mapping[str, Mapping[str, Any]]:
    """The conditions of an object that are True, by their types."""
    conditions = (item.get("status") or {}).get("conditions")
    if not conditions:
        return {}
    return {entry["type"]: entry for entry in conditions if entry.get("status") == "True"}


def is_owned_by(item: Manifest, uid: str) -> bool:
    """Whether the object with this uid is its controller."""
    return controller_uid(item) == uid


def controller_uid(item: Manifest) -> str | None:
    """The uid of the object that controls this one."""
    for reference in item["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference["uid"])
    return None


def ends(pod: Manifest) -> Iterator[ContainerEnd]:
    """The containers that have ended badly, those before the start first."""
    for status in _containers(pod):
        ended = (status.get("state") or {}).get("terminated")
        if ended and ended.get("exitCode", 0) != 0:
            yield ContainerEnd(
                str(status["name"]),
                int(ended["exitCode"]),
                str(ended.get("reason", "")),
                str(ended.get("message", "")),
                parse_time(ended.get("finishedAt")),
            )


def termination_message(pod: Manifest, container: str) -> str:
    """What the container left, well ended or not; empty where it left nothing."""
    for status in _containers(pod):
        if status["name"] == container:
            return str(((status.get("state") or {}).get("terminated") or {}).get("message", ""))
    return ""


def trouble(pod: Manifest) -> Trouble | None:
    """What keeps the pod from starting, if it is something that waiting does not mend."""
    name = str(pod["metadata"]["name"])
    for status in _containers(pod):
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason in IMAGE_REASONS:
            message = f"pod {name} cannot pull image {status.get('image')}: {reason}"
            return Trouble(name, message, names.REASON_IMAGE_PULL)
        ended = (status.get("lastState") or {}).get("terminated") or {}
        if reason == "CrashLoopBackOff" and ended.get("exitCode", 0) != 0:
            how = f"ends again and again, last with exit code {ended['exitCode']}{_last_words(pod, status, ended)}"
            never_ran = names.REASON_CONTAINER_START if ended.get("reason") in _NEVER_RAN else None
            return Trouble(name, f"container {status['name']} of pod {name} {how}", never_ran)
        if reason in CONFIG_REASONS:
            said = str(waiting.get("message", ""))[:500]
            message = f"container {status['name']} of pod {name} cannot start: {reason}: {said}"
            return Trouble(name, message, names.REASON_CONTAINER_START)
    unscheduled = condition_entry(pod, "PodScheduled")
    if unscheduled is not None and unscheduled.get("reason") == "Unschedulable":
        return Trouble(name, f"pod {name} has no node: {str(unscheduled.get('message', ''))[:500]}")
    return None


def _last_words(pod: Manifest, status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """What a container said before it ended; where those of a scorer can be read. They may hold hidden fields, which
    whoever may read a run need not see."""
    metadata = pod["metadata"]
    if (metadata.get("labels") or {}).get(names.LABEL_COMPONENT) == names.COMPONENT_SCORER:
        where = f"-n {metadata.get('namespace')} {metadata['name']} -c {status['name']}"
        return f"; kubectl logs {where} --previous says more"
    said = " ".join(str(ended.get("message", ""))[-500:].split())
    said = "".join(letter for letter in said if letter.isprintable())
    return f": {said}" if said else ""


def parse_time(text: object) -> datetime | None:
    """A time as the API server writes it."""
    return datetime.fromisoformat(text) if isinstance(text, str) else None


def _containers(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()
