"""What of an object is kept in memory: thousands of pods are known, and little of each matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import intern
from types import MappingProxyType
from typing import Any, Final

from kitestring_operator.observed import Manifest

_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "labels",
    "annotations",
    "ownerReferences",
    "generation",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
)
_EMPTY: Final[tuple[object, ...]] = (None, {}, [])
_BULKY_ANNOTATION: Final = "kubectl.kubernetes.io/last-applied-configuration"

_JOB_SPEC: Final = ("parallelism", "completions", "completionMode", "suspend", "backoffLimit", "activeDeadlineSeconds")
_POD_SPEC: Final = ("nodeName",)
_POD_STATUS: Final = ("phase", "reason", "message")
_POD_CONDITIONS: Final = frozenset({"Ready", "PodScheduled", "DisruptionTarget"})
_POD_CONDITION: Final = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER_STATUS: Final = ("name", "image", "state", "lastState")
_OWNER: Final = ("uid", "controller")
_SHARED_LENGTH: Final = 64
"""Words, times and images recur in thousands of objects; longer texts seldom do."""


def _replicated(manifest: Manifest) -> Manifest:
    return {"spec": _some(manifest.get("spec"), ("replicas",)), "status": manifest.get("status") or {}}


def _job(manifest: Manifest) -> Manifest:
    status = dict(manifest.get("status") or {})
    status.pop("uncountedTerminatedPods", None)
    return {"spec": _some(manifest.get("spec"), _JOB_SPEC), "status": status}


def _pod(manifest: Manifest) -> Manifest:
    status = manifest.get("status") or {}
    kept = _some(status, _POD_STATUS)
    kept["conditions"] = [
        _some(condition, _POD_CONDITION)
        for condition in status.get("conditions") or ()
        if condition["type"] in _POD_CONDITIONS
    ]
    for field in ("initContainerStatuses", "containerStatuses"):
        if status.get(field):
            kept[field] = [_some(container, _CONTAINER_STATUS) for container in status[field]]
    content: Manifest = _shared({"spec": _some(manifest.get("spec"), _POD_SPEC), "status": kept})
    return content


def _whole(manifest: Manifest) -> Manifest:
    return {field: manifest[field] for field in ("spec", "status") if field in manifest}


def _config(manifest: Manifest) -> Manifest:
    return {"data": manifest.get("data") or {}}


def _metadata_only(_manifest: Manifest) -> Manifest:
    return {}


_CONTENT: Final[Mapping[str, Callable[[Manifest], Manifest]]] = MappingProxyType(
    {
        "Job": _job,
        "Pod": _pod,
        "StatefulSet": _replicated,
        "Deployment": _replicated,
        "TrainingRun": _whole,
        "RolloutPool": _whole,
        "Workload": _whole,
        "ConfigMap": _config,
    }
)
"""Of kinds that are not here, such as Secrets, the metadata alone."""


def needs_content(kind: str) -> bool:
    """Whether more than the metadata of a kind is kept."""
    return kind in _CONTENT


def trimmed(manifest: Manifest) -> Manifest:
    """A copy with what matters. Of a pod: metadata, node, phase, some conditions, states of its containers."""
    kind = manifest["kind"]
    metadata = _some(manifest["metadata"], _METADATA)
    if "ownerReferences" in metadata:
        metadata["ownerReferences"] = _shared([_some(owner, _OWNER) for owner in metadata["ownerReferences"]])
    if _BULKY_ANNOTATION in metadata.get("annotations", {}):
        metadata["annotations"] = {
            key: value for key, value in metadata["annotations"].items() if key != _BULKY_ANNOTATION
        }
    if "labels" in metadata:
        metadata["labels"] = {intern(key): intern(value) for key, value in metadata["labels"].items()}
    content = _CONTENT.get(kind, _metadata_only)(manifest)
    return {"apiVersion": intern(manifest["apiVersion"]), "kind": intern(kind), "metadata": metadata, **content}


def _some(whole: Mapping[str, Any] | None, fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are there and not empty."""
    return {field: whole[field] for field in fields if whole.get(field) not in _EMPTY} if whole else {}


def _shared(value: Any) -> Any:
    """The same, with one string in memory for equal ones."""
    if isinstance(value, str):
        return intern(value) if len(value) <= _SHARED_LENGTH else value
    if isinstance(value, dict):
        return {intern(key): _shared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shared(inner) for inner in value]
    return value
