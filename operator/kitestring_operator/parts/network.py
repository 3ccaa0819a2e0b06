"""Network policies of a run's own parts: what is not said here is closed. Those of the agents are in `rollouts`.

A policy knows pods, namespaces and addresses, no host names. A service in the cluster is a Service of a namespace; one
elsewhere is open by its port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts.collector_pipelines import AGENT_PORT, is_apart
from kitestring_operator.parts.inputs import inputs_of

Entry = dict[str, Any]
"""One item of `ingress` or `egress`."""

LABEL_NAMESPACE = "kubernetes.io/metadata.name"
COMPONENT_OPERATOR = "operator"

DNS: Entry = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
"""Wherever the resolver is: the cluster's pods, or a cache on the node."""


def network_policies(context: RunContext) -> list[Manifest]:
    """`RUN-deny` for every pod of the run, and one for each of our parts."""
    policies = [
        policy(context, "deny", {names.LABEL_RUN: context.name}, ingress=[], egress=[]),
        _trainer(context),
        _gateway(context),
        _collector(context),
    ]
    if context.spec.trained_policies:
        policies.append(_policy_servers(context))
    return policies


def policy(
    context: RunContext,
    suffix: str,
    pods: dict[str, str],
    *,
    ingress: Sequence[Entry],
    egress: Sequence[Entry],
    component: str | None = None,
) -> Manifest:
    """A policy of both directions for the pods with these labels."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.metadata(context, identity.fitting(f"{context.name}-{suffix}"), component),
        "spec": {
            "podSelector": {"matchLabels": pods},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": deepcopy(list(ingress)),
            "egress": deepcopy(list(egress)),
        },
    }


def _trainer(context: RunContext) -> Manifest:
    queue = [names.PORT_QUEUE]
    among = [{"from": [peer(context, names.COMPONENT_TRAINER)]}] if context.spec.trainer.nodes > 1 else []
    egress = [
        DNS,
        to_pods(context, names.COMPONENT_GATEWAY, [names.PORT_GATEWAY_ADMIN]),
        *([{"to": [peer(context, names.COMPONENT_TRAINER)]}] if context.spec.trainer.nodes > 1 else []),
        *endpoints(context, [context.storage.endpoint, *_sources(context)]),
    ]
    scorer = context.pool.reward.scorer
    if scorer is not None:
        egress.append(to_pods(context, names.COMPONENT_SCORER, [scorer.port]))
    if context.spec.trained_policies:
        egress.append(to_pods(context, names.COMPONENT_POLICY_SERVER, [names.PORT_POLICY]))
    if {"wandb", "mlflow"} & set(context.spec.trainer.loggers):
        # their services are named by variables of the user's, not by the spec
        egress = [{}]
    return policy(
        context,
        names.COMPONENT_TRAINER,
        identity.selector(context, names.COMPONENT_TRAINER),
        component=names.COMPONENT_TRAINER,
        ingress=[
            from_pods(context, names.COMPONENT_ROLLOUT, queue),
            {"from": [_operator(context)], "ports": ports(queue)},
            *among,
        ],
        egress=egress,
    )


def _gateway(context: RunContext) -> Manifest:
    collectors = [names.PORT_COLLECTOR] + ([AGENT_PORT] if is_apart(context) else [])
    frozen = [policy.endpoint.url for policy in context.spec.frozen_policies if policy.endpoint is not None]
    egress = [
        DNS,
        to_pods(context, names.COMPONENT_COLLECTOR, collectors),
        *endpoints(context, frozen),
    ]
    if context.spec.trained_policies:
        egress.append(to_pods(context, names.COMPONENT_POLICY_SERVER, [names.PORT_POLICY]))
    return policy(
        context,
        names.COMPONENT_GATEWAY,
        identity.selector(context, names.COMPONENT_GATEWAY),
        component=names.COMPONENT_GATEWAY,
        ingress=[
            from_pods(context, names.COMPONENT_ROLLOUT, [names.PORT_AGENTS]),
            from_pods(context, names.COMPONENT_TRAINER, [names.PORT_GATEWAY_ADMIN]),
        ],
        egress=egress,
    )


def _policy_servers(context: RunContext) -> Manifest:
    return policy(
        context,
        names.COMPONENT_POLICY_SERVER,
        identity.selector(context, names.COMPONENT_POLICY_SERVER),
        component=names.COMPONENT_POLICY_SERVER,
        ingress=[
            from_pods(context, names.COMPONENT_GATEWAY, [names.PORT_POLICY]),
            from_pods(context, names.COMPONENT_TRAINER, [names.PORT_POLICY]),
        ],
        egress=[DNS, *endpoints(context, [context.storage.endpoint])],
    )


def _collector(context: RunContext) -> Manifest:
    taken = [names.PORT_COLLECTOR] + ([AGENT_PORT] if is_apart(context) else [])
    return policy(
        context,
        names.COMPONENT_COLLECTOR,
        identity.selector(context, names.COMPONENT_COLLECTOR),
        component=names.COMPONENT_COLLECTOR,
        ingress=[from_pods(context, names.COMPONENT_GATEWAY, taken)],
        egress=[DNS, *endpoints(context, [context.storage.endpoint])],
    )


# --- Peers --------------------------------------------------------------------------------------------------------


def peer(context: RunContext, component: str) -> dict[str, Any]:
    """Pods of one part of the same run."""
    return {"podSelector": {"matchLabels": identity.selector(context, component)}}


def ports(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def to_pods(context: RunContext, component: str, numbers: Iterable[int]) -> Entry:
    return {"to": [peer(context, component)], "ports": ports(numbers)}


def from_pods(context: RunContext, component: str, numbers: Iterable[int]) -> Entry:
    return {"from": [peer(context, component)], "ports": ports(numbers)}


def _operator(context: RunContext) -> dict[str, Any]:
    """The operator's pods; the queue wants its credential besides."""
    namespace = context.settings.leader_election.namespace
    return {
        "namespaceSelector": {"matchLabels": {LABEL_NAMESPACE: namespace}} if namespace else {},
        "podSelector": {
            "matchLabels": {
                names.LABEL_APP: names.LABEL_APP_VALUE,
                names.LABEL_COMPONENT: COMPONENT_OPERATOR,
            }
        },
    }


def _sources(context: RunContext) -> list[str]:
    return [url for item in inputs_of(context).given for url in item.endpoints]


def endpoints(context: RunContext, urls: Iterable[str]) -> list[Entry]:
    """Where these URLs lead, each once."""
    entries: list[Entry] = []
    for url in urls:
        entries += [entry for entry in endpoint(context, url) if entry not in entries]
    return entries


def endpoint(context: RunContext, url: str) -> list[Entry]:
    """Egress to the host of a URL.

    An address by itself; a Service by its namespace, on any port, since a policy sees the port of the pods and not that
    of the Service; any other name by its port, since a policy cannot name it. A name of two parts may be either
    (`minio.storage`, `huggingface.co`), which only a resolver knows: both are open.
    """
    parsed = urlsplit(url)
    host = parsed.hostname or ""
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _named(context, host, port)
    return [{"to": [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}], "ports": ports([port])}]


def _named(context: RunContext, host: str, port: int) -> list[Entry]:
    """A Service of the cluster (`name`, `name.namespace`, `name.namespace.svc`, …), or a host of elsewhere."""
    labels = host.rstrip(".").split(".")
    if len(labels) == 1:
        return [_anywhere_in(context.namespace)]
    if len(labels) >= 3 and labels[2] == "svc":
        return [_anywhere_in(labels[1])]
    elsewhere: Entry = {"ports": ports([port])}
    # a dot at its end says that the name is whole: the cluster's own domains are not tried
    return [_anywhere_in(labels[1]), elsewhere] if len(labels) == 2 and not host.endswith(".") else [elsewhere]


def _anywhere_in(namespace: str) -> Entry:
    return {"to": [{"namespaceSelector": {"matchLabels": {LABEL_NAMESPACE: namespace}}}]}
