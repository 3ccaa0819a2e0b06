"""Kinds of objects that the scenarios read and write, and where the API has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kitestring_api import names


@dataclass(frozen=True)
class Kind:
    """A kind by its API version, plural and scope."""

    name: str
    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Path of the collection, or of one object; without a namespace the collection is that of the whole cluster."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace is not None else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name is not None else "")


RUN: Final = Kind(names.KIND_TRAINING_RUN, names.API_VERSION, "trainingruns")
POOL: Final = Kind(names.KIND_ROLLOUT_POOL, names.API_VERSION, "rolloutpools")
POD: Final = Kind("Pod", "v1", "pods")
SERVICE: Final = Kind("Service", "v1", "services")
SECRET: Final = Kind("Secret", "v1", "secrets")
CONFIG_MAP: Final = Kind("ConfigMap", "v1", "configmaps")
CLAIM: Final = Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims")
EVENT: Final = Kind("Event", "v1", "events")
NODE: Final = Kind("Node", "v1", "nodes", namespaced=False)
NAMESPACE: Final = Kind("Namespace", "v1", "namespaces", namespaced=False)
JOB: Final = Kind("Job", "batch/v1", "jobs")
DEPLOYMENT: Final = Kind("Deployment", "apps/v1", "deployments")
STATEFUL_SET: Final = Kind("StatefulSet", "apps/v1", "statefulsets")
NETWORK_POLICY: Final = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
DISRUPTION_BUDGET: Final = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
QUOTA: Final = Kind("ResourceQuota", "v1", "resourcequotas")
POD_PRIORITY: Final = Kind("PriorityClass", "scheduling.k8s.io/v1", "priorityclasses", namespaced=False)
LEASE: Final = Kind("Lease", "coordination.k8s.io/v1", "leases")
DEFINITION: Final = Kind(
    "CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False
)
WORKLOAD: Final = Kind("Workload", "kueue.x-k8s.io/v1beta2", "workloads")
LOCAL_QUEUE: Final = Kind("LocalQueue", "kueue.x-k8s.io/v1beta2", "localqueues")
CLUSTER_QUEUE: Final = Kind("ClusterQueue", "kueue.x-k8s.io/v1beta2", "clusterqueues", namespaced=False)
RESOURCE_FLAVOR: Final = Kind("ResourceFlavor", "kueue.x-k8s.io/v1beta2", "resourceflavors", namespaced=False)
PRIORITY_CLASS: Final = Kind(
    "WorkloadPriorityClass", "kueue.x-k8s.io/v1beta2", "workloadpriorityclasses", namespaced=False
)

KINDS: Final = {kind.name: kind for kind in list(globals().values()) if isinstance(kind, Kind)}
"""All of them, by name."""
OF_A_RUN: Final = (JOB, POD, DEPLOYMENT, STATEFUL_SET, SERVICE, CONFIG_MAP, SECRET, NETWORK_POLICY, DISRUPTION_BUDGET)
"""Kinds of what a run's objects are."""
