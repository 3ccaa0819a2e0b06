"""The kinds of objects that the operator touches, and where the API server keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kitestring_api import names
from kitestring_operator.observed import Manifest, ObjectRef


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object and its place in the API. Of one that lies in no namespace, the namespace is empty."""

    kind: str
    api_version: str
    plural: str

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of an object, or of the collection; without `namespace`, of all of them."""
        parts = ["/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"]
        if namespace:
            parts.append(f"namespaces/{namespace}")
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)

    def ref(self, namespace: str, name: str) -> ObjectRef:
        """The reference of an object of this kind."""
        return ObjectRef(self.api_version, self.kind, namespace, name)


KINDS: Final[dict[str, Kind]] = {
    kind.kind: kind
    for kind in (
        Kind(names.KIND_TRAINING_RUN, names.API_VERSION, "trainingruns"),
        Kind(names.KIND_ROLLOUT_POOL, names.API_VERSION, "rolloutpools"),
        Kind("Pod", "v1", "pods"),
        Kind("Secret", "v1", "secrets"),
        Kind("ConfigMap", "v1", "configmaps"),
        Kind("Service", "v1", "services"),
        Kind("Event", "v1", "events"),
        Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims"),
        Kind("Job", "batch/v1", "jobs"),
        Kind("StatefulSet", "apps/v1", "statefulsets"),
        Kind("Deployment", "apps/v1", "deployments"),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
        Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
        Kind("Lease", "coordination.k8s.io/v1", "leases"),
        Kind("Workload", "kueue.x-k8s.io/v1beta2", "workloads"),
        Kind("LocalQueue", "kueue.x-k8s.io/v1beta2", "localqueues"),
        Kind("ResourceFlavor", "kueue.x-k8s.io/v1beta2", "resourceflavors"),
        Kind("PriorityClass", "scheduling.k8s.io/v1", "priorityclasses"),
    )
}
"""Every kind that the operator reads or writes, by name."""

RESOURCES: Final = (names.KIND_TRAINING_RUN, names.KIND_ROLLOUT_POOL)
"""Our own kinds."""
WATCHED: Final = (*RESOURCES, "Job", "StatefulSet", "Deployment", "Pod", "Workload")
"""Kinds whose changes are heard of at once, but for the Deployments of workers."""
NOT_OF_WORKERS: Final = f"{names.LABEL_COMPONENT}!={names.COMPONENT_ROLLOUT}"
"""Label selector of the watch on Deployments. One of workers changes whenever a pod of them turns ready or not, which
the pod itself has said: in a flood of pods every third event. What else changes in it is found at the next resync."""
LISTED: Final = ("Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
"""Kinds that runs own and that seldom change by themselves: they are listed at each resync."""


def is_watched(item: Manifest) -> bool:
    """Whether an event tells that this object has changed or gone."""
    labels = item["metadata"].get("labels") or {}
    is_of_workers = item["kind"] == "Deployment" and labels.get(names.LABEL_COMPONENT) == names.COMPONENT_ROLLOUT
    return item["kind"] in WATCHED and not is_of_workers


def path_of(ref: ObjectRef, subresource: str | None = None) -> str:
    """Path of one object."""
    return KINDS[ref.kind].path(ref.namespace, ref.name, subresource)
