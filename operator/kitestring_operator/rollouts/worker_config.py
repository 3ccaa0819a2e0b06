"""What the worker of a rollout pod is told: the content of its worker.json."""

from __future__ import annotations

from typing import Any

from kubernetes.utils.quantity import parse_quantity

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPoolSpec
from kitestring_api.v1alpha1.limits import Limits
from kitestring_operator import identity
from kitestring_operator.observed import RunContext

SOCKET_FOLDER = "/kitestring/socket"
SOCKET = f"{SOCKET_FOLDER}/launcher.sock"
SCRATCH_FOLDER = "/kitestring/scratch"

CREDENTIAL = "queueCredential"
"""Key in the Secret, and name of the file."""
CREDENTIAL_FOLDER = "/etc/kitestring-secrets/keys"

LINGER_SECONDS = 30
"""What workers of a Deployment wait for the operator to delete it when the run has ended; it may be away."""

LAST_WORD_SECONDS = 30
"""Between the end of the longest attempt and the end of the pod: to end what still runs, to report, to go."""


def grace_seconds(pool: RolloutPoolSpec) -> int:
    """What a pod gets between TERM and KILL: time for its rollouts to end, unless the template says otherwise."""
    said = (pool.template.spec.model_extra or {}).get("terminationGracePeriodSeconds")
    return said if isinstance(said, int) else pool.limits.seconds + LAST_WORD_SECONDS


def worker_config(context: RunContext, rollout: str | None = None) -> dict[str, Any]:
    """worker.json. With `rollout` the worker runs that one and ends (isolation: Job)."""
    pool = context.pool
    agent = pool.template.agent
    service = identity.trainer_name(context.name)
    queue = identity.service_host(service, context.namespace, context.settings.cluster_domain)
    config: dict[str, Any] = {
        "run": context.run_id,
        "name": "{hostname}",
        "queue_url": f"http://{queue}:{names.PORT_QUEUE}",
        "queue_credential_file": f"{CREDENTIAL_FOLDER}/{CREDENTIAL}",
        "capacity": pool.rollouts_per_worker if rollout is None else 1,
        # its environment and its folder are the container's: the launcher passes them on
        "agent": {"command": list(agent.command), "args": list(agent.args)},
        "agent_protocol": pool.agent_protocol.manifest(),
        "limits": _limits(pool.limits),
        "scratch_root": SCRATCH_FOLDER,
        "launcher_socket": SOCKET,
        "health": {"host": "0.0.0.0", "port": names.PORT_WORKER},  # noqa: S104 -- the kubelet asks from outside
        "drain_seconds": max(0, grace_seconds(pool) - LAST_WORD_SECONDS),
    }
    return config | ({"linger_seconds": LINGER_SECONDS} if rollout is None else {"rollout": rollout})


def _limits(limits: Limits) -> dict[str, Any]:
    """What the worker watches over; the gateway watches over calls and tokens, the queue over time."""
    said: dict[str, Any] = {
        "log_bytes": limits.log_bytes,
        "cpu_seconds": limits.cpu_seconds,
        "processes": limits.processes,
    }
    if limits.memory is not None:
        said["memory_bytes"] = max(1, int(parse_quantity(limits.memory)))  # type: ignore[no-untyped-call]
    return {name: value for name, value in said.items() if value is not None}
