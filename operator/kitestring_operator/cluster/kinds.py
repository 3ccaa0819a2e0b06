"""The kinds of objects that the operator touches, and where the API server keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kitestring_api import names
from kitestring_operator.observed import ObjectRef


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
"""Kinds whose changes are heard of at once."""
LISTED: Final = ("Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
"""Kinds that runs own and that seldom change by themselves: they are listed at each resync."""


def path_of(ref: ObjectRef, subresource: str | None = None) -> str:
    """Path of one object."""
    return KINDS[ref.kind].path(ref.namespace, ref.name, subresource)
