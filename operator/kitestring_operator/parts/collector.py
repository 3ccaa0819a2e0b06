"""The collector: a Deployment that writes traces to storage before it acknowledges them."""

from __future__ import annotations

from typing import Any

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.parts import credentials, pod
from kitestring_operator.parts.collector_pipelines import (
    Pipeline,
    is_apart,
    kind,
    pipelines,
)

COMPONENT = names.COMPONENT_COLLECTOR


def collector_objects(context: RunContext) -> list[Manifest]:
    """Service and Deployment. Raises OverlayRefusedError."""
    return [_service(context), _deployment(context)]


def _service(context: RunContext) -> Manifest:
    ports = {pipeline.port_name: pipeline.port for pipeline in pipelines(context)}
    return pod.service(context, identity.collector_name(context.name), COMPONENT, ports)


def _deployment(context: RunContext) -> Manifest:
    template = pod.pod_template(
        context,
        COMPONENT,
        _pod_spec(context),
        templates={
            "settings.defaultTemplates.collector": context.settings.default_templates.collector,
            "spec.traces.collector.template": context.spec.traces.collector.template,
        },
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": identity.metadata(context, identity.collector_name(context.name), COMPONENT),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": identity.selector(context, COMPONENT)},
            # the next one takes spans before the last one stops
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": template,
        },
    }


def _pod_spec(context: RunContext) -> dict[str, Any]:
    found = pipelines(context)
    volumes = [pod.config_volume(context, *(pipeline.file for pipeline in found))]
    for pipeline in found:
        volumes += [
            pod.keys_volume(context, *_keys(context, pipeline), name=_keys_volume(pipeline)),
            *([] if kind(context) == "contrib" else [pod.storage_volume(pipeline.secret, _storage_volume(pipeline))]),
        ]
    return {
        "terminationGracePeriodSeconds": 60,
        "containers": [_container(context, pipeline) for pipeline in found],
        "volumes": [*volumes, *pod.SCRATCH_VOLUMES],
    }


def _container(context: RunContext, pipeline: Pipeline) -> pod.Container:
    contrib = kind(context) == "contrib"
    health = pipeline.health_port if contrib else pipeline.port
    path = "/" if contrib else pod.HEALTH
    mounts = [
        pod.CONFIG_MOUNT,
        pod.mount(_keys_volume(pipeline), pod.KEYS_FOLDER, read_only=True),
        *([] if contrib else [pod.mount(_storage_volume(pipeline), pipeline.storage_folder, read_only=True)]),
        *pod.SCRATCH_MOUNTS,
    ]
    env = pod.variables()
    if contrib:
        env += [
            pod.secret_variable(names.ENV_S3_ACCESS_KEY, pipeline.secret, "accessKeyId"),
            pod.secret_variable(names.ENV_S3_SECRET_KEY, pipeline.secret, "secretAccessKey"),
        ]
    images = context.settings.images
    ports = {pipeline.port_name: pipeline.port}
    if contrib:
        ports[f"health-{health}"] = health  # names of ports have 15 characters at most
    made = pod.container(
        context,
        pipeline.name,
        images.collector_contrib if contrib else images.rollout,
        args=[f"--config={pod.CONFIG_FOLDER}/{pipeline.file}"]
        if contrib
        else pod.part_arguments("collector", pipeline.file),
        env=env,
        ports=ports,
        mounts=mounts,
        resources=pod.resources(
            context.spec.traces.collector.resources,
            requests={"cpu": "100m", "memory": "256Mi"},
            limits={"memory": "1536Mi"},
        ),
    )
    return made | {
        "startupProbe": pod.http_probe(path, health, period=1, failures=120),
        # ready also while storage is away: the collector itself tells its clients to come again
        "readinessProbe": pod.http_probe(path, health),
        "livenessProbe": pod.http_probe(path, health, period=20, failures=6, timeout=10),
    }


def _keys(context: RunContext, pipeline: Pipeline) -> list[str]:
    if not is_apart(context):
        return [credentials.COLLECTOR, credentials.AGENT]
    # the built-in one wants to know the trusted credential too, if only to tell it from its own
    if kind(context) == "builtin" and pipeline.credential == credentials.AGENT:
        return [credentials.COLLECTOR, credentials.AGENT]
    return [pipeline.credential]


def _keys_volume(pipeline: Pipeline) -> str:
    return "keys" if pipeline.credential == credentials.COLLECTOR else "agent-keys"


def _storage_volume(pipeline: Pipeline) -> str:
    return "storage" if pipeline.credential == credentials.COLLECTOR else "agent-storage"
