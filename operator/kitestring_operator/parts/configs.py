"""The config file of every part, as its own model reads it. No secret stands in them: they name files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import collector_pipelines, credentials, gateway, pod, trainer
from kitestring_operator.parts.inputs import inputs_of
from kitestring_operator.parts.places import (
    EVERYWHERE,
    FETCH_FILE,
    GATEWAY_FILE,
    INITIAL_WEIGHTS,
    LOOPBACK,
    POLICY_SERVER_FILE,
    RUN_FOLDER,
    SIDECAR_FILE,
    TRAINER_FILE,
    WEIGHTS_FOLDER,
    WORKER_FILE,
)
from kitestring_operator.parts.storage import store
from kitestring_operator.rollouts.worker_config import worker_config

FIRST_START_SECONDS = 60
"""So long a trainer waits for the first answer of storage: at a run's first start its address may be wrong..."""
LATER_START_SECONDS = 900
"""...and later it was right once."""


def config_map(context: RunContext) -> Manifest:
    """`RUN-config`. Raises UserMistakeError for what the parts cannot carry out."""
    files: dict[str, Mapping[str, Any]] = dict(collector_pipelines.configs(context))
    files[GATEWAY_FILE] = gateway_config(context)
    if context.spec.trained_policies:
        files[SIDECAR_FILE] = sidecar_config(context)
        if context.spec.inference.backend == "cpu":
            files[POLICY_SERVER_FILE] = policy_server_config(context)
    files[TRAINER_FILE] = trainer_config(context)
    files[FETCH_FILE] = {"items": inputs_of(context).fetched}
    files[WORKER_FILE] = worker_config(context)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": identity.metadata(context, identity.config_name(context.name)),
        "data": {name: json.dumps(config, indent=1, ensure_ascii=False) + "\n" for name, config in files.items()},
    }


def key_file(key: str) -> str:
    return f"{pod.KEYS_FOLDER}/{key}"


# --- Gateway ------------------------------------------------------------------------------------------------------


def gateway_config(context: RunContext) -> dict[str, Any]:
    spec = context.spec
    collector_host = pod.host_of_service(context, identity.collector_name(context.name))
    own = identity.gateway_name(context.name)
    config: dict[str, Any] = {
        "run": context.run_id,
        "agents": {"host": EVERYWHERE, "port": names.PORT_AGENTS},
        "admin": {"host": EVERYWHERE, "port": names.PORT_GATEWAY_ADMIN},
        # its own pod, by name: an attempt belongs to one process
        "advertised_url": f"http://{{hostname}}.{pod.host_of_service(context, own)}:{names.PORT_AGENTS}",
        "token_key_file": key_file(credentials.TOKEN_KEY),
        "admin_credential_file": key_file(credentials.ADMIN),
        "policies": [
            {"name": policy.name, "servers": policy_server_urls(context, policy.name), "aliases": policy.aliases}
            for policy in spec.trained_policies
        ],
        "frozen": [
            {
                "name": policy.name,
                "url": policy.endpoint.url,
                "model": policy.endpoint.model,
                "aliases": policy.aliases,
            }
            | ({"api_key_file": gateway.api_key_file(policy.name)} if policy.endpoint.api_key_secret_ref else {})
            for policy in spec.frozen_policies
            if policy.endpoint is not None
        ],
        "sampling": {
            "temperature": spec.rollouts.sampling.temperature,
            "max_tokens": spec.rollouts.sampling.max_tokens,
            "nonconforming": spec.rollouts.sampling.nonconforming,
        },
        "collector": {
            "url": f"http://{collector_host}:{names.PORT_COLLECTOR}",
            "credential_file": key_file(credentials.COLLECTOR),
            "agent_credential_file": key_file(credentials.AGENT),
        },
        "record_contents": spec.traces.record_contents,
        "hold_seconds": max(1, spec.gateway.hold_seconds),
        # A policy server that is started anew serves again after its weights are there: calls wait for it as they wait
        # for new weights.
        "connect_seconds": max(1, spec.gateway.hold_seconds),
        "drain_seconds": gateway.drain_seconds(context),
    }
    if collector_pipelines.is_apart(context):
        config["collector"]["agent_url"] = f"http://{collector_host}:{collector_pipelines.AGENT_PORT}"
    return config


# --- Policy server ------------------------------------------------------------------------------------------------


def policy_server_urls(context: RunContext, policy: str) -> list[str]:
    """Base URL of each replica's sidecar."""
    service = identity.policy_server_name(context.name, policy)
    return pod.pod_urls(context, service, context.spec.inference.replicas, names.PORT_POLICY)


def sidecar_config(context: RunContext) -> dict[str, Any]:
    return {
        "listen": {"host": EVERYWHERE, "port": names.PORT_POLICY},
        "server": f"http://{LOOPBACK}:{names.PORT_SERVER}",
        "store": store(context, pod.STORAGE_FOLDER),
        "folder": WEIGHTS_FOLDER,
        "credential_file": key_file(credentials.ADMIN),
    }


def policy_server_config(context: RunContext) -> dict[str, Any]:
    """Of the small server for CPU. Raises UserMistakeError for a parser that it does not know."""
    spec = context.spec
    policy = spec.trained_policies[0]
    parser = policy.tool_parser or "none"
    if parser not in ("hermes", "none"):
        raise UserMistakeError(
            f"spec.policies[{spec.policies.index(policy)}].toolParser: found {parser}; the CPU policy server knows "
            "hermes and none; write one of them, or use inference.backend: vllm"
        )
    return {
        "model": INITIAL_WEIGHTS,
        "served_model_name": policy.name,
        "host": LOOPBACK,
        "port": names.PORT_SERVER,
        "max_model_len": policy.max_model_len,
        "tool_parser": "hermes" if parser == "hermes" else None,
        "threads": spec.inference.threads or 1,
        "seed": spec.seed,
        "weights_root": WEIGHTS_FOLDER,
        "require_chat_template": True,
    }


# --- Trainer ------------------------------------------------------------------------------------------------------


def trainer_config(context: RunContext) -> dict[str, Any]:
    inputs = inputs_of(context)
    policies = context.spec.trained_policies
    gateways = pod.pod_urls(
        context, identity.gateway_name(context.name), context.spec.gateway.replicas, names.PORT_GATEWAY_ADMIN
    )
    config: dict[str, Any] = {
        "run": context.run_id,
        # the operator watches over the deadline: the trainer's would count the time for which the run was suspended
        "spec": context.spec.model_copy(update={"active_deadline_seconds": None}).manifest(),
        "pool": context.pool.manifest(),
        "store": store(context, pod.STORAGE_FOLDER),
        "folder": RUN_FOLDER,
        "model": inputs.model.path if inputs.model is not None else None,
        "train_tasks": inputs.train.path if inputs.train is not None else None,
        "validation_tasks": inputs.validation.path if inputs.validation is not None else None,
        "queue": {"host": EVERYWHERE, "port": names.PORT_QUEUE},
        "queue_credential_file": key_file(credentials.QUEUE),
        "gateways": gateways,
        "gateway_credential_file": key_file(credentials.ADMIN),
        "policy_servers": [url for policy in policies for url in policy_server_urls(context, policy.name)],
        "timing": {
            "stop": trainer.stop_seconds(context),
            "first_answer": FIRST_START_SECONDS if context.is_first_start else LATER_START_SECONDS,
        },
        "artifacts": True,
        "termination_log": "/dev/termination-log",
        "resume": True,
    }
    scorer = context.pool.reward.scorer
    if scorer is not None:
        host = pod.host_of_service(context, identity.scorer_name(context.name))
        config["scorer"] = f"http://{host}:{scorer.port}"
    if context.spec.trainer.nodes > 1:
        config["ray_head"] = trainer.ray_head(context)
    return config
