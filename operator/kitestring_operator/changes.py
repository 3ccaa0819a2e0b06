"""Which requests bring the cluster from what is there to what is wanted. Pure: none where nothing differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kitestring_api import names
from kitestring_operator.identity import SIZE
from kitestring_operator.observed import Manifest, ObjectRef
from kitestring_operator.pods import controller_uid


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply the whole object. `is_new`: nothing of the name has been seen."""

    manifest: Manifest
    is_new: bool


@dataclass(frozen=True, slots=True)
class Resize:
    """Set the size of what makes pods."""

    ref: ObjectRef
    patch: dict[str, Any]
    grows: bool


@dataclass(frozen=True, slots=True)
class Occupied:
    """An object of another owner has the name. It is never touched; it may go by itself (a namesake's remains)."""

    ref: ObjectRef


Change = Apply | Resize | Occupied


def changes(wanted: Iterable[Manifest], live: Callable[[ObjectRef], Manifest | None], uid: str) -> Iterator[Change]:
    """The changes, in the order of what is wanted. `uid`: of the run that owns it all.

    What makes pods keeps the form in which it was started, whatever a newer operator would write, and only its size
    changes: a run in progress is not taken apart. Workers are the exception: they are replaced a part at a time.
    """
    for manifest in wanted:
        ref = ObjectRef.of(manifest)
        there = live(ref)
        if there is None:
            yield Apply(manifest, is_new=True)
        elif controller_uid(there) != uid:
            yield Occupied(ref)
        elif "deletionTimestamp" in there["metadata"]:
            continue  # it comes again when it is gone
        elif not _is_kept(manifest) and _hash(manifest) != _hash(there):
            yield Apply(manifest, is_new=False)
        elif ref.kind in SIZE:
            yield from _resized(ref, manifest, there)


def _is_kept(manifest: Manifest) -> bool:
    if manifest["kind"] == "Deployment":
        return bool(manifest["metadata"]["labels"].get(names.LABEL_COMPONENT) != names.COMPONENT_ROLLOUT)
    return manifest["kind"] in SIZE


def _resized(ref: ObjectRef, manifest: Manifest, there: Manifest) -> Iterator[Resize]:
    field = SIZE[ref.kind]
    size, found = manifest["spec"].get(field), (there.get("spec") or {}).get(field)
    if size is not None and size != found:
        yield Resize(ref, {"spec": {field: size}}, grows=found is None or size > found)


def _hash(manifest: Manifest) -> str | None:
    digest: str | None = (manifest["metadata"].get("annotations") or {}).get(names.ANNOTATION_SPEC_HASH)
    return digest
