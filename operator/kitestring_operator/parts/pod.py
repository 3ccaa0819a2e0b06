"""What all pods of ours have in common: no privilege, a read-only root, configs and secrets as files, probes.

They pass the restricted Pod Security Standard as they are; a `template` may loosen them where the namespace allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from kitestring_api import names
from kitestring_api.v1alpha1.resources import Resources
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.overlay import overlaid

USER_ID = 65532
CONFIG_FOLDER = "/etc/kitestring"
SECRETS_FOLDER = "/etc/kitestring-secrets"
KEYS_FOLDER = f"{SECRETS_FOLDER}/keys"
STORAGE_FOLDER = f"{SECRETS_FOLDER}/storage"
HOME = "/kitestring/home"

READABLE = 0o444
"""Mode of secret files: root owns them, and who mounts them is not root. An fsGroup would have Kubernetes change the
owner of every file on the user's own volumes."""

Container = dict[str, Any]
Volume = dict[str, Any]


def container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


# --- Volumes ------------------------------------------------------------------------------------------------------


def config_volume(context: RunContext, *files: str) -> Volume:
    """Only these files of the run's ConfigMap: that of the trainer holds what agents must not see."""
    items = [{"key": file, "path": file} for file in files]
    return {"name": "config", "configMap": {"name": identity.config_name(context.name), "items": items}}


def keys_volume(context: RunContext, *keys: str, name: str = "keys") -> Volume:
    """Only these keys of the run's own Secret."""
    return secret_volume(name, identity.keys_name(context.name), keys)


def storage_volume(secret: str, name: str = "storage") -> Volume:
    return secret_volume(name, secret, ("accessKeyId", "secretAccessKey"))


def secret_volume(name: str, secret: str, keys: Iterable[str]) -> Volume:
    items = [{"key": key, "path": key} for key in keys]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": READABLE}}


def scratch_volume(name: str, size: str | None = None, *, memory: bool = False) -> Volume:
    """Gone with the pod. `memory`: counts against the memory of whoever writes into it."""
    source: dict[str, str] = {"medium": "Memory"} if memory else {}
    if size is not None:
        source["sizeLimit"] = size
    return {"name": name, "emptyDir": source}


def mount(volume: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": volume, "mountPath": path} | ({"readOnly": True} if read_only else {})


CONFIG_MOUNT = mount("config", CONFIG_FOLDER, read_only=True)
KEYS_MOUNT = mount("keys", KEYS_FOLDER, read_only=True)
STORAGE_MOUNT = mount("storage", STORAGE_FOLDER, read_only=True)
SCRATCH_MOUNTS = (mount("tmp", "/tmp"), mount("home", HOME))  # noqa: S108 -- in the pod
SCRATCH_VOLUMES = (scratch_volume("tmp"), scratch_volume("home"))


def variables(**given: str) -> list[dict[str, Any]]:
    """Environment of a container. What runs has no entry in /etc/passwd: libraries ask these for home and user."""
    own = {"HOME": HOME, "USER": "kitestring", "LOGNAME": "kitestring"}
    return [{"name": name, "value": value} for name, value in (own | given).items()]


def secret_variable(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


# --- Containers ---------------------------------------------------------------------------------------------------


def container(
    context: RunContext,
    name: str,
    image: str,
    *,
    args: Sequence[str] = (),
    command: Sequence[str] = (),
    env: Sequence[Mapping[str, Any]],
    ports: Mapping[str, int] | None = None,
    mounts: Sequence[Mapping[str, Any]],
    resources: Mapping[str, Any],
) -> Container:
    """A container of ours; probes and what is special about it are added by its part."""
    made: Container = {"name": name, "image": image, "imagePullPolicy": context.settings.image_pull_policy}
    if command:
        made["command"] = list(command)
    if args:
        made["args"] = list(args)
    made["env"] = [dict(variable) for variable in env]
    if ports:
        made["ports"] = [
            {"name": port_name, "containerPort": port, "protocol": "TCP"} for port_name, port in ports.items()
        ]
    return made | {
        "resources": dict(resources),
        "volumeMounts": [dict(entry) for entry in mounts],
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def part_arguments(part: str, file: str) -> list[str]:
    """Arguments of the images' entrypoint, `kitestring`."""
    return [part, "--config", f"{CONFIG_FOLDER}/{file}"]


def http_probe(path: str, port: int, *, period: int = 5, failures: int = 3, timeout: int = 3) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def resources(
    given: Resources | None,
    *,
    requests: Mapping[str, str],
    limits: Mapping[str, str] | None = None,
    gpus: int = 0,
) -> dict[str, dict[str, str]]:
    """Our defaults, and over them what the run says: of a kind that it names, nothing of ours remains."""
    asked, most = dict(requests), dict(limits or {})
    if given is not None:
        for kind in {*given.requests, *given.limits}:
            asked.pop(kind, None)
            most.pop(kind, None)
        asked |= given.requests
        most |= given.limits
    if gpus:
        most["nvidia.com/gpu"] = str(gpus)
    made = {"requests": dict(sorted(asked.items())), "limits": dict(sorted(most.items()))}
    return {kind: amounts for kind, amounts in made.items() if amounts}


# --- Pods ---------------------------------------------------------------------------------------------------------


def pod_template(
    context: RunContext,
    component: str,
    spec: Mapping[str, Any],
    *,
    further: Mapping[str, str] = identity.NONE,
    templates: Mapping[str, Mapping[str, Any] | None],
) -> Manifest:
    """A PodTemplateSpec of ours with `templates` (by the field where each stands) laid over it, the last one last.

    Raises OverlayRefusedError.
    """
    common: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
    }
    if context.spec.scheduling.priority_class_name is not None:
        common["priorityClassName"] = context.spec.scheduling.priority_class_name
    made: Manifest = deepcopy(
        {"metadata": {"labels": identity.labels(context, component, further)}, "spec": common | dict(spec)}
    )
    for field, template in templates.items():
        made = overlaid(made, template, field=field)
    return made


def ending_with(spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The spec of a pod that is over when its container `name` is.

    A pod that is not started again lasts as long as any of its containers: what a template has put beside that one
    becomes a native sidecar, started before it and ended after it, in the same order and with the same fields.
    """
    beside = [one for one in spec["containers"] if one["name"] != name]
    before = spec.get("initContainers") or []
    if not beside or not isinstance(before, list):  # no list: the API server says so
        return dict(spec)
    own = [one for one in spec["containers"] if one["name"] == name]
    sidecars = [one | {"restartPolicy": "Always"} for one in beside]
    return {**spec, "initContainers": [*before, *sidecars], "containers": own}


def spread(context: RunContext, component: str, further: Mapping[str, str] = identity.NONE) -> list[dict[str, Any]]:
    """Over nodes where there are some: the loss of one is not the loss of all."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": identity.selector(context, component, further)},
        }
    ]


def service(
    context: RunContext,
    name: str,
    component: str,
    ports: Mapping[str, int],
    *,
    further: Mapping[str, str] = identity.NONE,
    headless: bool = False,
    pods: Mapping[str, str] = identity.NONE,
) -> Manifest:
    """A Service of one part. Headless: its pods are addressed by name, ready or not. `pods` narrows its selector."""
    spec: dict[str, Any] = {"selector": identity.selector(context, component, further) | dict(pods)}
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    spec["ports"] = [
        {"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"} for port_name, port in ports.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": identity.metadata(context, name, component, further),
        "spec": spec,
    }


def host_of_service(context: RunContext, name: str) -> str:
    return identity.service_host(name, context.namespace, context.settings.cluster_domain)


def pod_urls(context: RunContext, service_name: str, replicas: int, port: int) -> list[str]:
    """URL of each pod of a StatefulSet whose headless Service has its name."""
    domain = context.settings.cluster_domain
    hosts = (
        identity.pod_host(f"{service_name}-{index}", service_name, context.namespace, domain)
        for index in range(replicas)
    )
    return [f"http://{host}:{port}" for host in hosts]


HEALTH = names.ROUTE_HEALTH


def short(name: str) -> str:
    """A name for a volume: dots, which names of objects may have and those of volumes not, become dashes."""
    if "." in name:
        name = f"{name.replace('.', '-')}-{identity.digest(name)}"
    return identity.fitting(name, 40)


def stateful_set(
    context: RunContext,
    name: str,
    component: str,
    *,
    replicas: int,
    template: Manifest,
    further: Mapping[str, str] = identity.NONE,
) -> Manifest:
    """Pods that are addressed by name, all started at once.

    A pod keeps what it was started with (OnDelete): a newer operator must not take the parts of a running run away.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": identity.metadata(context, name, component, further),
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": identity.selector(context, component, further)},
            "template": template,
        },
    }
