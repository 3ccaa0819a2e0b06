"""The nodes of a cluster that kind made, as machines: what no API of Kubernetes does to them."""

from __future__ import annotations

import pytest

from e2e.harness.api import Object
from e2e.node import engine, kube


def require() -> None:
    """Skip the scenario on a cluster of the user's own, whose machines are not ours to break."""
    if kube.external_kubeconfig() is not None:
        pytest.skip("needs the machines of the cluster: one that e2e/cluster has made")


def crash(pod: Object, container: str) -> None:
    """`kill -9` of a container's first process; nothing else can: within the container the kernel shields it."""
    runtime_id = status_of(pod, container)["containerID"].removeprefix("containerd://")
    on(pod["spec"]["nodeName"], "ctr", "--namespace", "k8s.io", "task", "kill", "--signal", "SIGKILL", runtime_id)


def on(node: str, *command: str) -> str:
    """Standard output of a command that root runs on a node."""
    return engine.docker("exec", node, *command)


def status_of(pod: Object, container: str) -> Object:
    """The status of a container of a pod."""
    status = pod["status"]
    for entry in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        if entry["name"] == container:
            return dict(entry)
    raise LookupError(f"pod {pod['metadata']['name']} has no container {container}")
