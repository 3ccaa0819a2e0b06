"""A cluster in a dictionary: the requests of `cluster.protocol`, and what happens in it by itself.

It knows uids, resource versions, owners and finishes what Kubernetes' own controllers would: pods of Jobs, StatefulSets
and Deployments. What it shows, it also tells: `told` has every event in order, for tests to lose, double or reorder.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from bench.operator.store import merged, now
from kitestring_operator.cluster.errors import AlreadyExistsError, ConflictError, RefusedError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.observed import Manifest, ObjectRef

_REPLICATED = {"StatefulSet": "replicas", "Deployment": "replicas", "Job": "parallelism"}


class FakeCluster:
    """See the module."""

    def __init__(self) -> None:
        self.objects: dict[ObjectRef, Manifest] = {}
        self.told: list[tuple[str, Manifest]] = []
        self.writes: list[tuple[str, ObjectRef]] = []
        self.refuses: dict[str, str] = {}
        """Name of an object → what applying it is answered with (422)."""
        self.logs: dict[str, str] = {}
        self.podless: set[str] = set()
        """Names of objects that cannot have their pods."""
        self.kinds = set(KINDS) - {"Workload", "LocalQueue"}
        self.reads = 0
        self.touched = asyncio.Event()
        """Set at every request."""
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    # --- Requests -------------------------------------------------------------------------------------------------

    async def apply(self, manifest: Manifest) -> Manifest:
        ref = ObjectRef.of(manifest)
        self.writes.append(("apply", ref))
        if ref.name in self.refuses:
            raise RefusedError(f"apply {ref.name}", 422, self.refuses[ref.name])
        there = self.objects.get(ref)
        if there is None:
            return self.put(manifest)
        changed = copy.deepcopy(there)
        for field, value in manifest.items():
            if field == "metadata":
                changed["metadata"] |= copy.deepcopy(value)
            else:
                changed[field] = copy.deepcopy(value)
        return self._show("MODIFIED", changed) if changed != there else self._copy(there)

    async def rehearse(self, manifest: Manifest) -> None:
        ref = ObjectRef.of(manifest)
        self.writes.append(("rehearse", ref))
        if ref.name in self.refuses:
            raise RefusedError(f"rehearse {ref.name}", 422, self.refuses[ref.name])

    async def create(self, manifest: Manifest) -> Manifest:
        ref = ObjectRef.of(manifest)
        self.writes.append(("create", ref))
        if ref in self.objects:
            raise AlreadyExistsError(f"create {ref.name}", 409, "AlreadyExists")
        return self.put(manifest)

    async def update(self, manifest: Manifest) -> Manifest:
        ref = ObjectRef.of(manifest)
        self.writes.append(("update", ref))
        there = self.objects.get(ref)
        if there is None or there["metadata"]["resourceVersion"] != manifest["metadata"]["resourceVersion"]:
            raise ConflictError(f"update {ref.name}", 409, "Conflict")
        return self._show("MODIFIED", copy.deepcopy(manifest))

    async def patch(
        self, ref: ObjectRef, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Manifest | None:
        self.writes.append((subresource or "patch", ref))
        there = self.objects.get(ref)
        version = patch.get("metadata", {}).get("resourceVersion")
        if there is not None and version not in (None, there["metadata"]["resourceVersion"]):
            raise ConflictError(f"patch {ref.name}", 409, "Conflict")
        return None if there is None else self._show("MODIFIED", merged(there, patch))

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> Manifest | None:
        self.writes.append(("status", ref))
        there = self.objects.get(ref)
        if there is None or there["metadata"]["uid"] != uid:
            return None
        return self._show("MODIFIED", there | {"status": copy.deepcopy(dict(status))})

    async def delete(
        self, ref: ObjectRef, *, uid: str, propagation: str = "Background", grace_seconds: int | None = None
    ) -> None:
        self.writes.append(("delete", ref))
        there = self.objects.get(ref)
        if there is not None and there["metadata"]["uid"] == uid:
            self.remove(ref)

    async def get(self, ref: ObjectRef) -> Manifest | None:
        self.reads += 1
        self.touched.set()
        there = self.objects.get(ref)
        return None if there is None else self._copy(there)

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        return [
            self._copy(item)
            for ref, item in self.objects.items()
            if ref.kind == kind
            and namespace in (None, ref.namespace)
            and wanted.items() <= (item["metadata"].get("labels") or {}).items()
        ]

    async def log_tail(self, pod: ObjectRef, container: str, *, lines: int, limit_bytes: int) -> str:
        last = self.logs.get(pod.name, "").splitlines(keepends=True)[-lines:]
        return "".join(last)[:limit_bytes]

    async def latest_event(self, namespace: str, uid: str, reason: str) -> str:
        self.reads += 1
        found = [
            item["message"]
            for item in self.of_kind("Event")
            if item["reason"] == reason and item["involvedObject"]["uid"] == uid
        ]
        return found[-1] if found else ""

    async def until(self, check: Callable[[], object]) -> None:
        """Wait until `check` holds, looking at every request."""
        async with asyncio.timeout(20):
            while not check():
                self.touched.clear()
                await self.touched.wait()

    async def serves(self, kind: str) -> bool:
        return kind in self.kinds

    # --- What happens in it ---------------------------------------------------------------------------------------

    def put(self, manifest: Manifest) -> Manifest:
        """An object that someone makes."""
        made = copy.deepcopy(manifest)
        made["metadata"]["uid"] = f"{next(self._uids):08d}-0000-4000-8000-000000000000"
        made["metadata"].setdefault("creationTimestamp", now())
        made["metadata"].setdefault("generation", 1)
        if made["kind"] == "Job":
            made["status"] = {"active": made["spec"].get("parallelism", 1)}
        return self._show("ADDED", made)

    def change(self, kind: str, name: str, change: Mapping[str, Any], namespace: str = "team-a") -> Manifest:
        """Someone changes an object; a change of the spec is a new generation."""
        ref = KINDS[kind].ref(namespace, name)
        changed = merged(self.objects[ref], change)
        if "spec" in change:
            changed["metadata"]["generation"] += 1
        return self._show("MODIFIED", changed)

    def remove(self, ref: ObjectRef) -> None:
        """The object goes, and after it what it owns."""
        gone = self.objects.pop(ref)
        self.told.append(("DELETED", gone | {"metadata": gone["metadata"] | {"resourceVersion": self._version()}}))
        uid = gone["metadata"]["uid"]
        for other, item in list(self.objects.items()):
            owners = [owner["uid"] for owner in item["metadata"].get("ownerReferences") or ()]
            if uid in owners and other in self.objects:
                self.remove(other)

    def find(self, kind: str, name: str, namespace: str = "team-a") -> Manifest | None:
        return self.objects.get(KINDS[kind].ref(namespace, name))

    def of_kind(self, kind: str) -> list[Manifest]:
        return [item for ref, item in self.objects.items() if ref.kind == kind]

    def make_pods(self) -> None:
        """What Kubernetes' own controllers and kubelets would do: every pod that is wanted is there, and ready."""
        for item in list(self.objects.values()):
            field = _REPLICATED.get(item["kind"])
            if field is None or _has_ended(item):
                continue
            size = 0 if item["metadata"]["name"] in self.podless else item["spec"].get(field, 1)
            own = [pod for pod in self.of_kind("Pod") if _owner(pod) == item["metadata"]["uid"]]
            for index in range(size):
                name = f"{item['metadata']['name']}-{index}"
                if all(pod["metadata"]["name"] != name for pod in own):
                    self._put_pod(item, name)
            for pod in own[size:]:
                self.remove(ObjectRef.of(pod))
            if item["kind"] != "Job" and (item.get("status") or {}).get("readyReplicas") != size:
                self.change(item["kind"], item["metadata"]["name"], {"status": {"readyReplicas": size}})

    def end_job(
        self,
        name: str,
        *,
        code: int | None = 0,
        message: str = "",
        disrupted: bool = False,
        is_over: bool = True,
    ) -> None:
        """The Job and its pods end with this code; `code=None`: the pods are removed."""
        job = self.find("Job", name)
        assert job is not None
        for pod in [pod for pod in self.of_kind("Pod") if _owner(pod) == job["metadata"]["uid"]]:
            if code is None:
                self.remove(ObjectRef.of(pod))
                continue
            ended = {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "finishedAt": now(),
                "message": message,
            }
            conditions = [{"type": "DisruptionTarget", "status": "True", "message": "drained"}] if disrupted else []
            status = {
                "phase": "Failed" if code else "Succeeded",
                "conditions": conditions,
                "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
            }
            self.change("Pod", pod["metadata"]["name"], {"status": status})
        # first that it is certain, then that it is so: two events
        certain, end = ("SuccessCriteriaMet", "Complete") if code == 0 else ("FailureTarget", "Failed")
        conditions = [{"type": certain, "status": "True", "lastTransitionTime": now()}]
        self.change("Job", name, {"status": {"active": None, "conditions": conditions}})
        if is_over:
            conditions.append({"type": end, "status": "True", "lastTransitionTime": now()})
            self.change("Job", name, {"status": {"conditions": conditions, "completionTime": now()}})

    def _put_pod(self, owner: Manifest, name: str) -> None:
        labels = dict(owner["spec"]["template"]["metadata"]["labels"])
        self.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": owner["metadata"]["namespace"],
                    "labels": labels,
                    "ownerReferences": [{"uid": owner["metadata"]["uid"], "controller": True}],
                },
                "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
            }
        )

    def _show(self, event: str, manifest: Manifest) -> Manifest:
        self.touched.set()
        manifest["metadata"]["resourceVersion"] = self._version()
        self.objects[ObjectRef.of(manifest)] = manifest
        self.told.append((event, self._copy(manifest)))
        return self._copy(manifest)

    def _version(self) -> str:
        return str(next(self._versions))

    @staticmethod
    def _copy(manifest: Manifest) -> Manifest:
        return copy.deepcopy(manifest)


def _owner(pod: Manifest) -> str:
    owners = pod["metadata"].get("ownerReferences") or [{"uid": ""}]
    return str(owners[0]["uid"])


def _has_ended(item: Manifest) -> bool:
    conditions = (item.get("status") or {}).get("conditions") or ()
    return any(entry["type"] in ("SuccessCriteriaMet", "FailureTarget") for entry in conditions)
