"""GPUs without GPUs: a capacity that the scheduler believes."""

from __future__ import annotations

import json

from e2e.node.kube import kubectl

_RESOURCE = "nvidia.com/gpu"


def set_capacity(node: str, count: int) -> None:
    """Say that a node has so many GPUs; 0 takes them away."""
    # The kubelet brings the allocatable part into line with the capacity by itself, but seconds later.
    status = json.loads(kubectl("get", "node", node, "--output", "json"))["status"]
    patches = []
    for part in ("capacity", "allocatable"):
        path = f"/status/{part}/{_RESOURCE.replace('/', '~1')}"
        if count:
            patches.append({"op": "add", "path": path, "value": str(count)})
        elif _RESOURCE in status[part]:
            patches.append({"op": "remove", "path": path})
    kubectl("patch", "node", node, "--subresource=status", "--type=json", "--patch", json.dumps(patches))
