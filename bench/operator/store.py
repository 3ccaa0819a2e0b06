"""Objects of a cluster in memory: what an API server answers to requests about them. Plain data, one thread."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

from kitestring_operator.observed import Manifest, ObjectRef

Event = Literal["ADDED", "MODIFIED", "DELETED"]
Listener = Callable[[Event, Manifest], None]


class RefusedError(Exception):
    """A request that is answered with an error; `status` is that of HTTP."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Write(NamedTuple):
    """A request that may change something: also one that changed nothing counts."""

    at: float
    verb: str
    ref: ObjectRef


class Store:
    """The objects by kind and reference, and every write that was asked for."""

    def __init__(self) -> None:
        self.version = 0
        self.writes: list[Write] = []
        self.listeners: list[Listener] = []
        self._objects: dict[str, dict[ObjectRef, Manifest]] = {}

    # --- Reading --------------------------------------------------------------------------------------------------

    def get(self, ref: ObjectRef) -> Manifest | None:
        """The object itself, not a copy."""
        return self._objects.get(ref.kind, {}).get(ref)

    def of_kind(self, kind: str) -> Iterator[Manifest]:
        """All objects of a kind, in the order in which they were made."""
        return iter(list(self._objects.get(kind, {}).values()))

    # --- Requests -------------------------------------------------------------------------------------------------

    def create(self, manifest: Manifest) -> Manifest:
        ref = ObjectRef.of(manifest)
        self._note("create", ref)
        if self.get(ref) is not None:
            raise RefusedError(HTTPStatus.CONFLICT, f"{ref.kind} {ref.name} already exists")
        return self.put(manifest)

    def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply, as far as one field manager needs it: the fields that are given replace those there."""
        ref = ObjectRef.of(manifest)
        self._note("apply", ref)
        there = self.get(ref)
        if there is None:
            return self.put(manifest)
        changed = there | {key: copy.deepcopy(value) for key, value in manifest.items() if key != "metadata"}
        changed["metadata"] = there["metadata"] | copy.deepcopy(manifest["metadata"])
        return there if changed == there else self.show("MODIFIED", changed)

    def update(self, manifest: Manifest) -> Manifest:
        ref = ObjectRef.of(manifest)
        self._note("update", ref)
        there = self.get(ref)
        if there is None or there["metadata"]["resourceVersion"] != manifest["metadata"].get("resourceVersion"):
            raise RefusedError(HTTPStatus.CONFLICT, "the object has been modified")
        return self.show("MODIFIED", copy.deepcopy(manifest))

    def patch(self, ref: ObjectRef, patch: Mapping[str, Any]) -> Manifest | None:
        """JSON merge patch."""
        self._note("patch", ref)
        there = self.get(ref)
        return None if there is None else self.show("MODIFIED", merged(there, patch))

    def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> Manifest | None:
        self._note("status", ref)
        there = self.get(ref)
        if there is None:
            return None
        if there["metadata"]["uid"] != uid:
            raise RefusedError(HTTPStatus.CONFLICT, "another uid")
        return self.show("MODIFIED", there | {"status": copy.deepcopy(dict(status))})

    def delete(self, ref: ObjectRef) -> Manifest | None:
        self._note("delete", ref)
        return self._remove(ref)

    # --- What happens by itself -----------------------------------------------------------------------------------

    def put(self, manifest: Manifest) -> Manifest:
        """An object that is made by someone."""
        made = copy.deepcopy(manifest)
        made["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now(),
            "generation": 1,
            "managedFields": managed_fields(manifest),
        }
        return self.show("ADDED", made)

    def show(self, event: Event, manifest: Manifest) -> Manifest:
        """Keep the object under a new version, and tell of it."""
        self.version += 1
        kept = manifest | {"metadata": manifest["metadata"] | {"resourceVersion": str(self.version)}}
        ref = ObjectRef.of(kept)
        self._objects.setdefault(ref.kind, {})[ref] = kept
        for listener in self.listeners:
            listener(event, kept)
        return kept

    def _remove(self, ref: ObjectRef) -> Manifest | None:
        gone = self._objects.get(ref.kind, {}).pop(ref, None)
        if gone is None:
            return None
        self.version += 1
        gone = gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self.version)}}
        for listener in self.listeners:
            listener("DELETED", gone)
        return gone

    def _note(self, verb: str, ref: ObjectRef) -> None:
        self.writes.append(Write(time.monotonic(), verb, ref))


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merged(there: Any, patch: Any) -> Any:
    """The result of a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(there) if isinstance(there, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def managed_fields(manifest: Manifest) -> list[Manifest]:
    """An entry as bulky as the real ones: objects come over the wire with it."""
    fields = _fields({key: value for key, value in manifest.items() if key not in ("apiVersion", "kind")})
    return [{"manager": "kitestring-bench", "operation": "Apply", "fieldsType": "FieldsV1", "fieldsV1": fields}]


def _fields(value: Any) -> Manifest:
    if isinstance(value, Mapping):
        return {f"f:{key}": _fields(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return {f'k:{{"name":"{index}"}}': _fields(inner) for index, inner in enumerate(value)}
    return {}
