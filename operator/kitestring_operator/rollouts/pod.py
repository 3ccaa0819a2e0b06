"""The pod in which agents run: the user's template with our launcher and worker in it, and walls around.

What is ours and cannot be loosened: the init container `launcher`, the sidecar `worker` (another user; it alone mounts
config and credential), the command of `agent`, the labels. What is a default, each replaced by the template's own word:
no service-account token, not root, read-only root, no capability, seccomp, requests, grace period.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kitestring_api import names
from kitestring_api.v1alpha1.pod_template import (
    AGENT_CONTAINER,
    LAUNCHER_CONTAINER,
    RESERVED_VOLUME_PREFIX,
    WORKER_CONTAINER,
    WORKER_USER,
)
from kitestring_api.v1alpha1.resources import Resources
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.overlay import merged, overlaid
from kitestring_operator.parts.places import WORKER_FILE
from kitestring_operator.parts.pod import (
    CONFIG_FOLDER,
    HEALTH,
    Container,
    container,
    container_security,
    ending_with,
    http_probe,
    mount,
    part_arguments,
    resources,
    scratch_volume,
    secret_volume,
)
from kitestring_operator.rollouts.template import check
from kitestring_operator.rollouts.worker_config import (
    CREDENTIAL,
    CREDENTIAL_FOLDER,
    SCRATCH_FOLDER,
    SOCKET,
    SOCKET_FOLDER,
    grace_seconds,
)

AGENT_USER = 10001
LAUNCHER_FOLDER = "/kitestring/bin"
IMAGE_LAUNCHER = "/kitestring/launcher"
"""Where the launcher lies in the rollout image."""

TOLD_TO_END = ("python", "-ISc", "import os, signal; os.kill(1, signal.SIGTERM)")
"""In the worker's container, whose first process is the worker."""

AGENT_REQUESTS: Mapping[str, str] = {"cpu": "250m", "memory": "256Mi"}
"""Of a template that says nothing. No limit: what an agent needs is not ours to guess."""
SCRATCH_SIZE = "8Gi"
TEMPORARY_SIZE = "1Gi"
"""A pod that writes more is evicted; the node's disk is not the agent's to fill."""

_CONFIG, _KEYS, _SOCKET, _LAUNCHER, SCRATCH_VOLUME, TEMPORARY_VOLUME = (
    f"{RESERVED_VOLUME_PREFIX}{name}" for name in ("config", "keys", "socket", "launcher", "scratch", "tmp")
)
_TEMPORARY = "/tmp"  # noqa: S108 -- in the pod


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """Where the worker finds its config and its credential: the volume sources."""

    config: Mapping[str, Any]
    keys: Mapping[str, Any]

    @classmethod
    def of_run(cls, context: RunContext) -> WorkerFiles:
        """Those of all workers of the run. Only its own of the run's files and keys: the others are the trainer's."""
        items = [{"key": WORKER_FILE, "path": WORKER_FILE}]
        return cls(
            {"configMap": {"name": identity.config_name(context.name), "items": items}},
            secret_volume("", identity.keys_name(context.name), [CREDENTIAL]),
        )

    @classmethod
    def of_secret(cls, name: str) -> WorkerFiles:
        """Those of one rollout, in a Secret of its own."""
        return cls(secret_volume("", name, [WORKER_FILE]), secret_volume("", name, [CREDENTIAL]))


def rollout_pod(
    context: RunContext,
    files: WorkerFiles,
    *,
    further: Mapping[str, str] = identity.NONE,
    image: str | None = None,
    asked: Resources | None = None,
) -> Manifest:
    """PodTemplateSpec, but for its restart policy. `image` and `asked` are the task's word for the container `agent`.

    `further` are labels. Raises OverlayRefusedError when the installation's template takes a part of ours away, or no
    pod can be made of the pool's.
    """
    ours = overlaid(
        _ours(context, files), context.settings.default_templates.rollout, field="settings.defaultTemplates.rollout"
    )
    template = context.pool.template.manifest()
    check(template, (_CONFIG, _KEYS, _SOCKET, _LAUNCHER), imageless=() if image is None else (AGENT_CONTAINER,))
    made = merged(ours, template)
    labels = identity.labels(context, names.COMPONENT_ROLLOUT, {names.LABEL_POOL: context.pool_name, **further})
    metadata = made.get("metadata", {})
    spec = made["spec"]
    if context.pool.isolation == "Job":
        spec = made["spec"] = ending_with(spec, AGENT_CONTAINER)
    spec["initContainers"] = _ours_last(spec["initContainers"])
    spec["terminationGracePeriodSeconds"] = grace_seconds(context.pool)
    spec = made["spec"] = walled(spec, but=(LAUNCHER_CONTAINER, WORKER_CONTAINER))
    agent = next(one for one in spec["containers"] if one["name"] == AGENT_CONTAINER)
    _launched(agent)
    agent["resources"] = _agent_resources(agent.get("resources") or {}, asked)
    if image is not None:
        agent["image"] = image
    return {"metadata": metadata | {"labels": metadata.get("labels", {}) | labels}, "spec": spec}


def strangers_pod() -> dict[str, Any]:
    """What the spec of a pod begins with that runs what a user has written."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsUser": AGENT_USER,
            "runAsGroup": AGENT_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _ours(context: RunContext, files: WorkerFiles) -> Manifest:
    spec: dict[str, Any] = {
        **strangers_pod(),
        "initContainers": [_launcher(context), _worker(context)],
        "containers": [],
        "volumes": [
            {**files.config, "name": _CONFIG},
            {**files.keys, "name": _KEYS},
            scratch_volume(_SOCKET, "1Mi"),
            scratch_volume(_LAUNCHER, "64Mi"),
            scratch_volume(SCRATCH_VOLUME, SCRATCH_SIZE),
            scratch_volume(TEMPORARY_VOLUME, TEMPORARY_SIZE),
        ],
    }
    if context.spec.scheduling.priority_class_name is not None:
        spec["priorityClassName"] = context.spec.scheduling.priority_class_name
    return {"metadata": {}, "spec": spec}


def _launcher(context: RunContext) -> Container:
    made = container(
        context,
        LAUNCHER_CONTAINER,
        context.settings.images.rollout,
        command=[IMAGE_LAUNCHER, "install", LAUNCHER_FOLDER],
        env=[],
        mounts=[mount(_LAUNCHER, LAUNCHER_FOLDER)],
        resources=resources(None, requests={"cpu": "10m", "memory": "16Mi"}, limits={"memory": "64Mi"}),
    )
    return made | {"securityContext": _worker_security()}


def _worker(context: RunContext) -> Container:
    made = container(
        context,
        WORKER_CONTAINER,
        context.settings.images.rollout,
        args=part_arguments("worker", WORKER_FILE),
        env=[],
        ports={"health": names.PORT_WORKER},
        mounts=[
            mount(_CONFIG, CONFIG_FOLDER, read_only=True),
            mount(_KEYS, CREDENTIAL_FOLDER, read_only=True),
            mount(_SOCKET, SOCKET_FOLDER),
        ],
        resources=resources(None, requests={"cpu": "50m", "memory": "96Mi"}, limits={"memory": "512Mi"}),
    )
    return made | {
        # a sidecar: it is there before the agent's container starts, and until after it has ended
        "restartPolicy": "Always",
        # it listens: the launcher, which starts after this, can come. Healthy it is only when one is there
        "startupProbe": {"tcpSocket": {"port": names.PORT_WORKER}, "periodSeconds": 1, "failureThreshold": 120},
        "readinessProbe": http_probe(HEALTH, names.PORT_WORKER),
        # when the pod is to end, and not only when the agent's container has ended, as SIGTERM comes to a sidecar; and
        # from the kubelet, where nobody in that container can pretend it
        "lifecycle": {"preStop": {"exec": {"command": list(TOLD_TO_END)}}},
        "securityContext": _worker_security(),
    }


def _worker_security() -> dict[str, Any]:
    """All of it said on the container: what a template says of the pod does not reach it."""
    return container_security() | {
        "runAsNonRoot": True,
        "runAsUser": WORKER_USER,
        "runAsGroup": WORKER_USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _ours_last(containers: list[Container]) -> list[Container]:
    """What the user prepares comes first: the worker then finds a launcher that can start agents."""
    return sorted(containers, key=lambda one: one["name"] in (LAUNCHER_CONTAINER, WORKER_CONTAINER))


def walled(spec: Manifest, *, but: Collection[str] = ()) -> Manifest:
    """A pod with containers of the user's, all that are not called as in `but`: our defaults below what they say."""
    made = spec | {"securityContext": _not_root_unless_said(spec.get("securityContext") or {})}
    for group in ("initContainers", "containers"):
        if group in spec:
            made[group] = [one if one["name"] in but else _walled(one) for one in spec[group]]
    return made


def _walled(one: Container) -> Container:
    security = merged(container_security(), one.get("securityContext") or {})
    made = one | {"securityContext": _not_root_unless_said(security)}
    made.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return made


def _not_root_unless_said(security: dict[str, Any]) -> dict[str, Any]:
    """`runAsUser: 0` is word enough: with our runAsNonRoot beside it no container would start."""
    if "runAsUser" not in security:
        return security
    return {"runAsNonRoot": security["runAsUser"] != 0} | security


def _launched(agent: Container) -> None:
    """The launcher in place of the agent's command, which the worker knows. Its socket and program cannot be written:
    on a mount that is read-only one may connect, but not take the socket's place."""
    agent["command"] = [f"{LAUNCHER_FOLDER}/launcher", "--socket", SOCKET]
    agent.pop("args", None)
    there = {one["mountPath"].rstrip("/"): one for one in agent.get("volumeMounts") or []}
    ours = {
        LAUNCHER_FOLDER: mount(_LAUNCHER, LAUNCHER_FOLDER, read_only=True),
        SOCKET_FOLDER: mount(_SOCKET, SOCKET_FOLDER, read_only=True),
    }
    writable = {
        SCRATCH_FOLDER: mount(SCRATCH_VOLUME, SCRATCH_FOLDER),
        _TEMPORARY: mount(TEMPORARY_VOLUME, _TEMPORARY),
    }
    agent["volumeMounts"] = list((writable | there | ours).values())


def _agent_resources(said: Mapping[str, Any], asked: Resources | None) -> dict[str, Any]:
    """Requests of ours where the template says nothing of a kind; over both what the task asks for."""
    requests, limits = (_amounts(said.get(field)) for field in ("requests", "limits"))
    ours = {kind: amount for kind, amount in AGENT_REQUESTS.items() if kind not in requests | limits}
    further = {field: said[field] for field in said if field not in ("requests", "limits")}
    return further | resources(asked, requests=ours | requests, limits=limits)


def _amounts(said: Mapping[str, Any] | None) -> dict[str, str]:
    """YAML reads `cpu: 1` as a number; the API writes quantities as text."""
    return {kind: str(amount) for kind, amount in (said or {}).items()}
