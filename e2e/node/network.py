"""The network of a cluster whose node image brings none: routed veth pairs, static routes, kube-router's firewall."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from e2e.node import layout
from e2e.node.command import Failed
from e2e.node.engine import docker
from e2e.node.kube import kubectl

_PODS: Final = "10.244.0.0/16"
_CONFLIST: Final = "/etc/cni/net.d/10-kitestring-e2e.conflist"
_FIREWALL: Final = ("--namespace", "kube-system", "daemonset/kube-router")
_NOWHERE: Final = "kitestring.dev/firewall-rests"
"""Label of nodes that no node has."""


def install(count: int) -> None:
    """Give each of so many nodes its part of the pod network, and enforce NetworkPolicy."""
    nodes = _nodes(count)
    for name, (subnet, _) in nodes.items():
        routes = [f"ip route replace {other} via {address}" for peer, (other, address) in nodes.items() if peer != name]
        # Pods keep their own address among themselves (policies select by it) and take the node's towards the outside.
        outside = f"POSTROUTING -s {_PODS} ! -d {_PODS} -j MASQUERADE"
        masquerade = f"iptables -t nat -C {outside} 2>/dev/null || iptables -t nat -A {outside}"
        script = "\n".join(["set -e", "mkdir -p /etc/cni/net.d", f"cat >{_CONFLIST}", *routes, masquerade])
        docker("exec", "--interactive", name, "sh", "-c", script, stdin=json.dumps(_conflist(subnet)))
    manifest = layout.HERE / "manifests" / "kube-router.yaml"
    kubectl("apply", "--server-side", "--filename", manifest)


@contextmanager
def resting_firewall() -> Iterator[None]:
    """With kube-router at rest: the rules that it made stay, and no new ones are made.

    It makes all rules anew at each change of a pod or policy: with 1,200 policies that takes both cores for minutes.
    """
    if not kubectl("get", *_FIREWALL, "--ignore-not-found", "--output", "name"):
        yield
        return
    try:
        _place_firewall({_NOWHERE: "true"})
        yield
    finally:
        _place_firewall({_NOWHERE: None})


def _place_firewall(selector: dict[str, str | None]) -> None:
    patch = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
    kubectl("patch", *_FIREWALL, "--type", "merge", "--patch", json.dumps(patch))
    kubectl("rollout", "status", *_FIREWALL, "--timeout=120s", timeout=150)


def _conflist(subnet: str) -> dict[str, object]:
    """Plugins that wire a pod: a routed pair, so that also neighbours on one node pass the firewall, and host ports."""
    ranges = [[{"subnet": subnet}]]
    ipam = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": ipam},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return {"cniVersion": "0.4.0", "name": "kitestring-e2e", "plugins": plugins}


def _nodes(count: int) -> dict[str, tuple[str, str]]:
    """Each node with its pods' subnet and its own address, once all have them: right after their start they may not, or
    be none yet that the cluster knows."""
    deadline = time.monotonic() + 60
    while True:
        nodes = {}
        for item in json.loads(kubectl("get", "nodes", "--output", "json"))["items"]:
            addresses = {entry["type"]: entry["address"] for entry in item["status"].get("addresses", [])}
            if item["spec"].get("podCIDR") and "InternalIP" in addresses:
                nodes[item["metadata"]["name"]] = (item["spec"]["podCIDR"], addresses["InternalIP"])
            elif time.monotonic() > deadline:
                raise Failed(f"node {item['metadata']['name']} has had no podCIDR for 60 s")
            else:
                break
        else:
            if len(nodes) == count:
                return nodes
            if time.monotonic() > deadline:
                raise Failed(f"the cluster has known {len(nodes)} of {count} nodes for 60 s: {', '.join(nodes)}")
        time.sleep(0.3)
