"""What the operator has seen of the cluster. Events may be lost, doubled or late: the latest version of each counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

from kitestring_api import names
from kitestring_operator.cluster.trimmed import trimmed
from kitestring_operator.observed import Manifest, ObjectRef

EventType = Literal["ADDED", "MODIFIED", "DELETED"]
RunKey = tuple[str, str]
"""Namespace and name of a run."""


class ObjectCache:
    """Trimmed objects by reference, and those of a run together. Not thread-safe: it belongs to the event loop."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[ObjectRef, Manifest]] = {}
        self._of_run: dict[RunKey, dict[ObjectRef, Manifest]] = {}

    def observe(self, manifest: Manifest, event: EventType | None = None) -> bool:
        """Take in an object as the server showed it. Whether anything changed by it."""
        ref = ObjectRef.of(manifest)
        known = self._objects.get(ref.kind, {}).get(ref)
        if event == "DELETED":
            # a late word about an object of that name that was made anew since is not about this one
            if known is None or known["metadata"]["uid"] != manifest["metadata"]["uid"]:
                return False
            self._drop(ref)
            return True
        if known is not None and not _is_newer(manifest, known):
            return False
        self._drop(ref)  # its labels may have changed
        kept = trimmed(manifest)
        self._objects.setdefault(ref.kind, {})[ref] = kept
        run = run_of(kept)
        if run is not None:
            self._of_run.setdefault(run, {})[ref] = kept
        return True

    def forget(self, ref: ObjectRef, uid: str) -> None:
        """The object of this uid is known to be gone."""
        known = self.get(ref)
        if known is not None and known["metadata"]["uid"] == uid:
            self._drop(ref)

    def mark_deleted(self, ref: ObjectRef, uid: str) -> None:
        """The object of this uid was deleted just now; until the cluster shows it, or that it is gone, it counts so."""
        known = self.get(ref)
        if known is not None and known["metadata"]["uid"] == uid:
            known["metadata"].setdefault("deletionTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    def versions(self, kind: str) -> dict[ObjectRef, str]:
        """The resource version of each object of a kind: to be taken before a list is asked for, for `replace`."""
        return {ref: item["metadata"].get("resourceVersion", "") for ref, item in self._objects.get(kind, {}).items()}

    def replace(self, kind: str, listed: Iterable[Manifest], before: Mapping[ObjectRef, str]) -> list[Manifest]:
        """Take in a list of all objects of a kind. What was known `before` it was asked for and is not in it has gone.

        Gives what changed, those that have gone included.
        """
        changed = []
        present = set()
        for manifest in listed:
            ref = ObjectRef.of(manifest)
            present.add(ref)
            if ref in before and self.get(ref) is None:
                continue  # it has gone since the list was begun
            if self.observe(manifest):
                changed.append(self._objects[kind][ref])
        for ref, version in before.items():
            known = self.get(ref)
            if ref not in present and known is not None and known["metadata"].get("resourceVersion", "") == version:
                self._drop(ref)
                changed.append(known)
        return changed

    def get(self, ref: ObjectRef) -> Manifest | None:
        """The object, or None."""
        return self._objects.get(ref.kind, {}).get(ref)

    def of_kind(self, kind: str) -> Collection[Manifest]:
        """All objects of a kind."""
        return self._objects.get(kind, {}).values()

    def of_run(self, namespace: str, run: str) -> Collection[Manifest]:
        """All objects that carry the label of a run; the run itself does not."""
        return self._of_run.get((namespace, run), {}).values()

    def _drop(self, ref: ObjectRef) -> None:
        known = self._objects.get(ref.kind, {}).pop(ref, None)
        run = None if known is None else run_of(known)
        if run is not None and run in self._of_run:
            self._of_run[run].pop(ref, None)
            if not self._of_run[run]:
                del self._of_run[run]


def run_of(manifest: Manifest) -> RunKey | None:
    """The run whose label an object carries."""
    metadata = manifest["metadata"]
    run = (metadata.get("labels") or {}).get(names.LABEL_RUN)
    return None if run is None else (metadata["namespace"], run)


def _is_newer(manifest: Manifest, known: Manifest) -> bool:
    """Versions are numbers of one sequence (Kubernetes guarantees their order since 1.35, and always kept it)."""
    if manifest["metadata"]["uid"] != known["metadata"]["uid"]:
        return _version(manifest) >= _version(known)
    return _version(manifest) > _version(known)


def _version(manifest: Manifest) -> int:
    return int(manifest["metadata"]["resourceVersion"])
