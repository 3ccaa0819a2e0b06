"""What Kubernetes' own controllers and kubelets do, at once: what makes pods has them, and they are ready.

The pods are as long as real ones: the API server's defaults, the conditions and the managed fields are there.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

from bench.operator.store import Event, Store, now
from kitestring_operator.observed import Manifest

_SIZE = {"StatefulSet": "replicas", "Deployment": "replicas", "Job": "parallelism"}
_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
_POD_DEFAULTS: Mapping[str, Any] = {
    "dnsPolicy": "ClusterFirst",
    "enableServiceLinks": False,
    "nodeName": "node-0123.example.internal",
    "preemptionPolicy": "PreemptLowerPriority",
    "priority": 0,
    "schedulerName": "default-scheduler",
    "serviceAccount": "default",
    "serviceAccountName": "default",
    "tolerations": [
        {"effect": "NoExecute", "key": f"node.kubernetes.io/{what}", "operator": "Exists", "tolerationSeconds": 300}
        for what in ("not-ready", "unreachable")
    ],
}


class Workloads:
    """Makes the pods of what appears in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._random = random.Random(0)
        store.listeners.append(self._saw)

    def _saw(self, event: Event, manifest: Manifest) -> None:
        field = _SIZE.get(manifest["kind"])
        if event != "ADDED" or field is None:
            return
        size = int(manifest["spec"].get(field, 1))
        for index in range(size):
            self._store.put(self._pod(manifest, index))
        status = {"active": size, "startTime": now()} if manifest["kind"] == "Job" else {"readyReplicas": size}
        self._store.show("MODIFIED", manifest | {"status": status})

    def _pod(self, owner: Manifest, index: int) -> Manifest:
        metadata, template = owner["metadata"], owner["spec"]["template"]
        suffix = "".join(self._random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        labels = template["metadata"]["labels"] | {"pod-template-hash": "85d8c7c9f8"}
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        pod: Manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{metadata['name']}-{index}-{suffix}",
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": dict(template["metadata"].get("annotations") or {}),
                "ownerReferences": [reference],
            },
            "spec": copy.deepcopy(template["spec"]) | copy.deepcopy(dict(_POD_DEFAULTS)),
        }
        pod["status"] = status(pod, is_ready=True, restarts=0)
        return pod


def status(pod: Manifest, *, is_ready: bool, restarts: int) -> Manifest:
    """The status of a pod that runs. `restarts`: of its containers."""
    spec, word = pod["spec"], "True" if is_ready else "False"
    return {
        "phase": "Running",
        "hostIP": "10.12.14.16",
        "hostIPs": [{"ip": "10.12.14.16"}],
        "podIP": "10.244.12.34",
        "podIPs": [{"ip": "10.244.12.34"}],
        "qosClass": "Burstable",
        "startTime": now(),
        "conditions": [
            {
                "type": kind,
                "status": word if kind in ("Ready", "ContainersReady") else "True",
                "lastProbeTime": None,
                "lastTransitionTime": now(),
                "observedGeneration": 1,
            }
            for kind in _CONDITIONS
        ],
        "initContainerStatuses": [
            _container(container, is_ready=True, restarts=restarts) for container in spec.get("initContainers") or ()
        ],
        "containerStatuses": [
            _container(container, is_ready=is_ready, restarts=restarts) for container in spec["containers"]
        ],
    }


def _container(container: Manifest, *, is_ready: bool, restarts: int) -> Manifest:
    digest = "sha256:" + "0123456789abcdef" * 4
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": f"{container['image'].rpartition(':')[0]}@{digest}",
        "containerID": f"containerd://{digest[7:]}",
        "ready": is_ready,
        "started": is_ready,
        "restartCount": restarts,
        "state": {"running": {"startedAt": now()}},
        "lastState": {},
        "resources": container.get("resources") or {},
        "volumeMounts": [
            {"name": mount["name"], "mountPath": mount["mountPath"], "recursiveReadOnly": "Disabled"}
            for mount in container.get("volumeMounts") or ()
        ],
    }
