"""What the pods of agents may reach, and nothing else: the gateway, the cluster's DNS, what the pool allows.

The queue too: worker and agent share the pod's address, so that no policy tells them apart. A credential guards it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from kitestring_api import names
from kitestring_api.v1alpha1.network import Destination
from kitestring_api.v1alpha1.reward import ContainerScorer
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext

Range = ipaddress.IPv4Network | ipaddress.IPv6Network

LINK_LOCAL: tuple[Range, ...] = (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fe80::/10"))
"""Where clouds answer whoever asks with the credentials of the node."""
METADATA: tuple[Range, ...] = (ipaddress.ip_network("fd00:ec2::254/128"),)
"""The same of AWS, by IPv6, in a range that is otherwise private networks'."""


def rollout_policy(context: RunContext) -> Manifest:
    """NetworkPolicy RUN-rollout: selected for both directions, its pods have what stands here and no more."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.metadata(context, identity.fitting(f"{context.name}-rollout"), names.COMPONENT_ROLLOUT),
        "spec": {
            "podSelector": {"matchLabels": identity.selector(context, names.COMPONENT_ROLLOUT)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [
                _to_part(context, names.COMPONENT_GATEWAY, names.PORT_AGENTS),
                _to_part(context, names.COMPONENT_TRAINER, names.PORT_QUEUE),
                DNS,
                *(_to(destination) for destination in context.pool.network.egress),
            ],
        },
    }


def scorer_policy(context: RunContext, scorer: ContainerScorer) -> Manifest:
    """NetworkPolicy RUN-scorer: the trainer alone comes in; DNS and what the pool allows are all that it reaches."""
    selector = identity.selector(context, names.COMPONENT_SCORER)
    trainer = {"podSelector": {"matchLabels": identity.selector(context, names.COMPONENT_TRAINER)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.metadata(context, identity.scorer_name(context.name), names.COMPONENT_SCORER),
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [trainer], "ports": [{"protocol": "TCP", "port": scorer.port}]}],
            "egress": [DNS, *(_to(destination) for destination in scorer.network.egress)],
        },
    }


def _to_part(context: RunContext, component: str, port: int) -> dict[str, Any]:
    return {
        "to": [{"podSelector": {"matchLabels": identity.selector(context, component)}}],
        "ports": [{"protocol": "TCP", "port": port}],
    }


DNS: dict[str, Any] = {
    "to": [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        },
        # NodeLocal DNSCache: a process of the node, at the address that its manifests give it
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ],
    "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
}
"""The cluster's DNS, by the label that all its usual forms have. Not port 53 of anything: that would be a way out."""


def _to(destination: Destination) -> dict[str, Any]:
    rule: dict[str, Any] = {"to": [_peer(destination)]}
    if destination.ports:
        rule["ports"] = [
            {"protocol": port.protocol, "port": port.port}
            | ({} if port.end_port is None else {"endPort": port.end_port})
            for port in destination.ports
        ]
    return rule


def _peer(destination: Destination) -> dict[str, Any]:
    if destination.cidr is not None:
        block: dict[str, Any] = {"cidr": destination.cidr}
        except_ = [*destination.except_, *_left_out(destination)]
        return {"ipBlock": block | ({"except": except_} if except_ else {})}
    selectors = {"podSelector": destination.pod_selector, "namespaceSelector": destination.namespace_selector}
    return {name: selector for name, selector in selectors.items() if selector is not None}


def _left_out(destination: Destination) -> Iterator[str]:
    """What of a wide range an agent never needs and must not have, unless the pool names it by itself."""
    whole = ipaddress.ip_network(destination.cidr or "")
    said = {ipaddress.ip_network(text) for text in destination.except_}
    for part in (*LINK_LOCAL, *METADATA):
        inside = part.version == whole.version and part != whole and part.subnet_of(whole)  # type: ignore[arg-type]
        covered = any(part.version == one.version and part.subnet_of(one) for one in said)  # type: ignore[arg-type]
        if inside and not covered:
            yield str(part)
