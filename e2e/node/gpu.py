"""GPUs without GPUs: a capacity that the scheduler believes."""

from __future__ import annotations

import json

from e2e.node.kube import kubectl


def set_capacity(node: str, count: int) -> None:
    """Say that a node has so many `nvidia.com/gpu`; 0 takes them away."""
    path = "/status/capacity/nvidia.com~1gpu"
    capacity = json.loads(kubectl("get", "node", node, "--output", "jsonpath={.status.capacity}"))
    if count:
        patch = {"op": "add", "path": path, "value": str(count)}
    elif "nvidia.com/gpu" in capacity:
        patch = {"op": "remove", "path": path}
    else:
        return
    kubectl("patch", "node", node, "--subresource=status", "--type=json", "--patch", json.dumps([patch]))
