"""What a run consists of, but for its agents: pure functions from a RunContext to manifests."""

from __future__ import annotations

from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts.collector import collector_objects
from kitestring_operator.parts.configs import config_map
from kitestring_operator.parts.disruption import disruption_budgets
from kitestring_operator.parts.gateway import gateway_objects
from kitestring_operator.parts.network import network_policies
from kitestring_operator.parts.policy_server import policy_server_objects
from kitestring_operator.parts.storage import storage_secret
from kitestring_operator.parts.trainer import trainer_job, trainer_services


def run_objects(context: RunContext) -> list[Manifest]:
    """Everything of a running run but rollouts, in the order in which it is to be applied.

    Raises UserMistakeError, naming the field, for what cannot be carried out: templates that would take a part away,
    arguments that contradict ours, a checkpoint that is not there.
    """
    secret = storage_secret(context)
    return [
        *([secret] if secret is not None else []),
        config_map(context),
        *network_policies(context),
        *trainer_services(context),
        *collector_objects(context),
        *gateway_objects(context),
        *policy_server_objects(context),
        *disruption_budgets(context),
        trainer_job(context),
    ]
