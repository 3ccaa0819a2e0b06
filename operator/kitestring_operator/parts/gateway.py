"""The gateway: a StatefulSet, since an attempt belongs to one process and finds it by its pod's name.

A pod that is told to end takes no new attempt and waits for those it holds; what is open after that is lost, and tried
again. It needs no preStop hook: nobody reaches it through a balancer that would have to forget it first.
"""

from __future__ import annotations

from typing import Any

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import credentials, pod
from kitestring_operator.parts.places import GATEWAY_FILE

COMPONENT = names.COMPONENT_GATEWAY
CONTAINER = "gateway"
MODELS_FOLDER = f"{pod.SECRETS_FOLDER}/models"
"""API keys of frozen models, a file for each policy."""

GRACE_SECONDS = 60
"""Between TERM and KILL. `gateway.template.spec.terminationGracePeriodSeconds` changes it."""
LAST_SECONDS = 15
"""Of these, for writing the last spans."""


def gateway_objects(context: RunContext) -> list[Manifest]:
    """Service and StatefulSet. Raises OverlayRefusedError."""
    name = identity.gateway_name(context.name)
    ports = {"agents": names.PORT_AGENTS, "admin": names.PORT_GATEWAY_ADMIN}
    service = pod.service(context, name, COMPONENT, ports, headless=True)
    replicas = context.spec.gateway.replicas
    return [service, pod.stateful_set(context, name, COMPONENT, replicas=replicas, template=template(context))]


def drain_seconds(context: RunContext) -> int:
    """How long a gateway that is told to end waits for the attempts it holds."""
    return max(0, int(template(context)["spec"]["terminationGracePeriodSeconds"]) - LAST_SECONDS)


def api_key_file(policy: str) -> str:
    """Where the API key of a frozen policy lies."""
    return f"{MODELS_FOLDER}/{policy}"


def template(context: RunContext) -> Manifest:
    """The PodTemplateSpec."""
    keys = (credentials.TOKEN_KEY, credentials.ADMIN, credentials.COLLECTOR, credentials.AGENT)
    mounts = [pod.CONFIG_MOUNT, pod.KEYS_MOUNT, *pod.SCRATCH_MOUNTS]
    volumes = [pod.config_volume(context, GATEWAY_FILE), pod.keys_volume(context, *keys), *pod.SCRATCH_VOLUMES]
    models = _api_keys(context)
    if models:
        mounts.append(pod.mount("models", MODELS_FOLDER, read_only=True))
        volumes.append({"name": "models", "projected": {"sources": models, "defaultMode": pod.READABLE}})
    container = pod.container(
        context,
        CONTAINER,
        context.settings.images.rollout,
        args=pod.part_arguments("gateway", GATEWAY_FILE),
        env=pod.variables(),
        ports={"agents": names.PORT_AGENTS, "admin": names.PORT_GATEWAY_ADMIN},
        mounts=mounts,
        resources=pod.resources(
            context.spec.gateway.resources,
            requests={"cpu": "250m", "memory": "256Mi"},
            limits={"memory": "2Gi"},
        ),
    ) | {
        "startupProbe": pod.http_probe(pod.HEALTH, names.PORT_GATEWAY_ADMIN, period=1, failures=120),
        "readinessProbe": pod.http_probe(names.ROUTE_READY, names.PORT_GATEWAY_ADMIN),
        "livenessProbe": pod.http_probe(pod.HEALTH, names.PORT_GATEWAY_ADMIN, period=20, failures=6, timeout=10),
    }
    return pod.pod_template(
        context,
        COMPONENT,
        {
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "topologySpreadConstraints": pod.spread(context, COMPONENT),
            "containers": [container],
            "volumes": volumes,
        },
        templates={
            "settings.defaultTemplates.gateway": context.settings.default_templates.gateway,
            "spec.gateway.template": context.spec.gateway.template,
        },
    )


def _api_keys(context: RunContext) -> list[dict[str, Any]]:
    """Sources of the projected volume."""
    sources = []
    for policy in context.spec.frozen_policies:
        reference = policy.endpoint.api_key_secret_ref if policy.endpoint is not None else None
        if reference is not None:
            items = [{"key": reference.key, "path": policy.name}]
            sources.append({"secret": {"name": reference.name, "items": items}})
    return sources
