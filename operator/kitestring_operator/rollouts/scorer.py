"""The pool's scorer, where it has one of its own: pods of the user's that get hidden fields, and agents never reach.

Its walls are those of an agent's pod, and like them defaults that its template may take down: no service-account token,
not root, read-only root, no capability, seccomp. What cannot be loosened: image, command and port, which have fields of
their own, the network of its own, no privilege.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kitestring_api import names
from kitestring_api.v1alpha1.reward import PORT_VARIABLE, ContainerScorer
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.overlay import WALLS, OverlayRefusedError, Refusal, Walls, overlaid
from kitestring_operator.parts import pod
from kitestring_operator.parts.disruption import REPLICATED, budget
from kitestring_operator.rollouts.network import scorer_policy
from kitestring_operator.rollouts.pod import (
    AGENT_REQUESTS,
    SCRATCH_SIZE,
    TEMPORARY_SIZE,
    strangers_pod,
    walled,
)

COMPONENT: Final = names.COMPONENT_SCORER
CONTAINER: Final = "scorer"
FIELD: Final = "spec.reward.scorer.template"

_NETWORK = "remove it: its pods have a network of their own, with walls"
SCORER_WALLS: Final = Walls(
    container_fields={
        "image": "write spec.reward.scorer.image",
        "command": "write spec.reward.scorer.command",
        "args": "write spec.reward.scorer.args",
        "ports": "write spec.reward.scorer.port",
        "restartPolicy": WALLS.container_fields["restartPolicy"],
        "terminationMessagePath": WALLS.container_fields["terminationMessagePath"],
        "terminationMessagePolicy": WALLS.container_fields["terminationMessagePolicy"],
    },
    pod_fields={
        **WALLS.pod_fields,
        **dict.fromkeys(("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"), _NETWORK),
    },
    variables=(PORT_VARIABLE,),
)


def scorer_objects(context: RunContext) -> list[Manifest]:
    """NetworkPolicy, Service, budget and Deployment RUN-scorer; none where the pool has no scorer of its own.

    Raises OverlayRefusedError for a template that takes a part of it away.
    """
    scorer = context.pool.reward.scorer
    if scorer is None:
        return []
    name = identity.scorer_name(context.name)
    return [
        scorer_policy(context, scorer),
        pod.service(context, name, COMPONENT, {"http": scorer.port}),
        budget(context, name, COMPONENT, REPLICATED),
        _deployment(context, name, scorer),
    ]


def _deployment(context: RunContext, name: str, scorer: ContainerScorer) -> Manifest:
    further = {names.LABEL_POOL: context.pool_name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": identity.metadata(context, name, COMPONENT, further),
        "spec": {
            "replicas": scorer.replicas,
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": identity.selector(context, COMPONENT)},
            # none beyond what was asked for: a machine for one more may not be there
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": _template(context, scorer, further),
        },
    }


def _template(context: RunContext, scorer: ContainerScorer, further: dict[str, str]) -> Manifest:
    spec: dict[str, Any] = {
        **strangers_pod(),
        "topologySpreadConstraints": pod.spread(context, COMPONENT),
        "containers": [_container(context, scorer)],
        "volumes": [pod.scratch_volume("tmp", TEMPORARY_SIZE), pod.scratch_volume("home", SCRATCH_SIZE)],
    }
    if context.spec.scheduling.priority_class_name is not None:
        spec["priorityClassName"] = context.spec.scheduling.priority_class_name
    made: Manifest = {"metadata": {"labels": identity.labels(context, COMPONENT, further)}, "spec": spec}
    for field, template in (
        ("settings.defaultTemplates.scorer", context.settings.default_templates.scorer),
        (FIELD, scorer.template),
    ):
        made = overlaid(made, template, field=field, walls=SCORER_WALLS)
        refused = list(_without_walls(made["spec"], f"{field}.spec"))
        if refused:
            raise OverlayRefusedError(refused)
    return made | {"spec": walled(made["spec"])}


def _container(context: RunContext, scorer: ContainerScorer) -> pod.Container:
    port = [{"name": PORT_VARIABLE, "value": str(scorer.port)}]
    said = {variable.name for variable in scorer.env}
    defaults = [variable for variable in pod.variables() if variable["name"] not in said]
    made = pod.container(
        context,
        CONTAINER,
        scorer.image,
        command=scorer.command,
        args=scorer.args,
        env=[*port, *defaults, *(variable.manifest() for variable in scorer.env)],
        ports={"http": scorer.port},
        mounts=pod.SCRATCH_MOUNTS,
        resources=pod.resources(scorer.resources, requests=AGENT_REQUESTS),
    )
    # the policy of the settings is for images of ours
    del made["imagePullPolicy"]
    return made | {
        "readinessProbe": {
            "tcpSocket": {"port": scorer.port},
            "periodSeconds": 5,
            "timeoutSeconds": 3,
            "failureThreshold": 3,
        }
    }


def _without_walls(spec: Manifest, field: str) -> Iterator[Refusal]:
    """What no wall of ours could be put around."""
    yield from _object(spec.get("securityContext"), f"{field}.securityContext")
    for group in ("initContainers", "containers"):
        found = spec.get(group)
        if found is not None and not isinstance(found, list):
            yield Refusal(f"{field}.{group}", f"{found!r:.80}", "a list is needed", "write a list")
            continue
        for index, one in enumerate(found or ()):
            where = f"{field}.{group}[{index}]"
            if not isinstance(one, dict):
                yield from _object(one, where)
                continue
            if not isinstance(one.get("name"), str):
                yield Refusal(f"{where}.name", f"{one.get('name')!r:.80}", "a name is needed", "write one")
            security = one.get("securityContext")
            yield from _object(security, f"{where}.securityContext")
            if isinstance(security, dict) and security.get("privileged"):
                remedy = "remove it; add the capabilities that are needed, or set runtimeClassName"
                why = "no wall holds a privileged container"
                yield Refusal(f"{where}.securityContext.privileged", "true", why, remedy)


def _object(value: object, field: str) -> Iterator[Refusal]:
    if value is not None and not isinstance(value, dict):
        yield Refusal(field, f"{value!r:.80}", "an object is needed", "write an object")
