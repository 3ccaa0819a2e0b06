"""Budgets for disruptions that someone chooses, such as the drain of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext

REPLICATED: Final[Mapping[str, Any]] = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
"""Of parts that have replicas. One that does not serve anyway holds up no drain: else, while one of them cannot start,
no node of the others could be emptied."""


def disruption_budgets(context: RunContext) -> list[Manifest]:
    """One for each part that a drain would hurt; that of a scorer comes with it.

    Collector and workers need none: their work is taken up by others.
    """
    trainer = names.COMPONENT_TRAINER
    gateway = names.COMPONENT_GATEWAY
    budgets = [
        # `maxUnavailable: 0` means the same, but a Job has no scale from which Kubernetes could count it
        budget(context, identity.trainer_name(context.name), trainer, {"minAvailable": context.spec.trainer.nodes}),
        budget(context, identity.gateway_name(context.name), gateway, REPLICATED),
    ]
    for policy in context.spec.trained_policies:
        name = identity.policy_server_name(context.name, policy.name)
        further = {names.LABEL_POLICY: policy.name}
        budgets.append(budget(context, name, names.COMPONENT_POLICY_SERVER, REPLICATED, further))
    return budgets


def budget(
    context: RunContext, name: str, component: str, bound: Mapping[str, Any], further: dict[str, str] | None = None
) -> Manifest:
    """The budget of the pods of one part."""
    selected = identity.selector(context, component, further or identity.NONE)
    spec: dict[str, Any] = {**bound, "selector": {"matchLabels": selected}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": identity.metadata(context, name, component, further or identity.NONE),
        "spec": spec,
    }
