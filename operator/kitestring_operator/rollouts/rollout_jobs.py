"""Isolation Job: a Job with a Secret for one rollout that the queue asks for."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from kubernetes.utils.quantity import parse_quantity
from pydantic import ValidationError

from kitestring_api import names
from kitestring_api.images import is_allowed
from kitestring_api.v1alpha1 import RolloutPoolSpec
from kitestring_api.v1alpha1.pod_template import AGENT_CONTAINER
from kitestring_api.v1alpha1.resources import Resources
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext, WantedRollout
from kitestring_operator.parts.places import WORKER_FILE
from kitestring_operator.pods import conditions_that_hold
from kitestring_operator.rollouts.pod import WorkerFiles, rollout_pod
from kitestring_operator.rollouts.worker_config import CREDENTIAL, LAST_WORD_SECONDS, worker_config

START_SECONDS = 900
"""What a pod may take to be placed, to pull its image and to start, beyond the time of its attempt."""

_SAMPLE = "sample"


def rollout_job(context: RunContext, wanted: WantedRollout) -> list[Manifest]:
    """Secret and Job of one attempt, the Secret first. `wanted` has passed `refusal`. Raises OverlayRefusedError."""
    name = identity.rollout_job_name(context.name, wanted.rollout, wanted.number)
    further = {names.LABEL_POOL: context.pool_name, names.LABEL_ROLLOUT: identity.fitting(wanted.rollout)}
    metadata = identity.metadata(context, name, names.COMPONENT_ROLLOUT, further)
    metadata["annotations"] = {names.ANNOTATION_ROLLOUT: wanted.rollout, names.ANNOTATION_NUMBER: str(wanted.number)}
    if wanted.image is not None:
        metadata["annotations"][names.ANNOTATION_TASK_IMAGE] = wanted.image
    template = rollout_pod(
        context,
        WorkerFiles.of_secret(name),
        further={names.LABEL_ROLLOUT: further[names.LABEL_ROLLOUT]},
        image=wanted.image,
        asked=_resources(wanted),
    )
    template["spec"]["restartPolicy"] = "Never"
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "data": {
            CREDENTIAL: _encoded(wanted.credential),
            WORKER_FILE: _encoded(json.dumps(worker_config(context, wanted.rollout), sort_keys=True)),
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            # one try: whether another follows is the queue's decision, under a name of its own
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            # a pod that drains is not failed yet: its worker still says how the agent ended
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": START_SECONDS + context.pool.limits.seconds + LAST_WORD_SECONDS,
            "template": template,
        },
    }
    return [secret, job]


def sample_job(context: RunContext) -> Manifest:
    """The Job of a rollout whose task says nothing of its pod, or only its image where the pool's template has none.
    It is made of no rollout, and never run. Raises OverlayRefusedError."""
    image = None
    if context.pool.per_task.image_field is not None and not context.pool.template.agent.image:
        image = context.pool.allowed_images[0].replace("*", _SAMPLE)
    return rollout_job(context, WantedRollout(_SAMPLE, 1, "none", image))[-1]


def refusal(pool: RolloutPoolSpec, wanted: WantedRollout) -> str | None:
    """Why no pod is made for a rollout, whatever the queue says; None when one is. The task is at fault."""
    if wanted.image is None and not pool.template.agent.image:
        return f"the field {pool.per_task.image_field} names no image, and spec.template of the pool has none"
    if wanted.image is not None and not is_allowed(wanted.image, pool.allowed_images):
        allowed = ", ".join(pool.allowed_images) or "none"
        return f"image {wanted.image} is not one that spec.allowedImages of the pool allows ({allowed})"
    try:
        _resources(wanted)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in ("resources", *first["loc"]))
        return f"{where}: found {first['input']!r}: {first['msg']}"
    return None


def beyond(admitted: Mapping[str, str], wanted: WantedRollout) -> str | None:
    """What a task asks for above `admitted`, which a queue has set aside for the agent of each rollout; None: nothing.
    `wanted` has passed `refusal`."""
    asked = _resources(wanted)
    if asked is None:
        return None
    for kind, amount in sorted((asked.limits | asked.requests).items()):
        there = admitted.get(kind)
        if _is_more(amount, there or "0"):
            return (
                f"resources: found {kind} {amount}, and the queue of the run has set {there or 'none'} aside "
                "for each rollout; raise it in spec.template of the pool, or ask for less"
            )
    return None


def agent_requests(job: Manifest) -> dict[str, str]:
    """What the agent of a Job has set aside: of a kind without a request its limit, as Kubernetes has it."""
    containers = job["spec"]["template"]["spec"]["containers"]
    said = next(one.get("resources") or {} for one in containers if one["name"] == AGENT_CONTAINER)
    return {**said.get("limits", {}), **said.get("requests", {})}


def _is_more(amount: str, other: str) -> bool:
    try:
        return bool(parse_quantity(amount) > parse_quantity(other))  # type: ignore[no-untyped-call]
    except ValueError:
        return False  # no quantity: the API server says so


def _resources(wanted: WantedRollout) -> Resources | None:
    """ValidationError. Numbers are quantities: a task row says `{"cpu": 0.5}` as well as `{"cpu": "500m"}`."""
    if wanted.resources is None:
        return None
    return Resources.from_manifest({kind: _texts(amounts) for kind, amounts in wanted.resources.items()})


def _texts(amounts: object) -> object:
    if not isinstance(amounts, Mapping):
        return amounts
    return {
        kind: str(amount) if isinstance(amount, int | float) and not isinstance(amount, bool) else amount
        for kind, amount in amounts.items()
    }


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def attempt_seconds(job: Manifest) -> int:
    """Time of the agent of such a Job."""
    return int(job["spec"]["activeDeadlineSeconds"]) - START_SECONDS - LAST_WORD_SECONDS


def has_ended(job: Manifest) -> bool:
    """Whether a Job is complete or failed; Kubernetes says so when no pod of it runs any more."""
    return not conditions_that_hold(job).keys().isdisjoint(("Complete", "Failed"))


def rollout_of(job: Manifest) -> tuple[str, int]:
    """(rollout, number) of a Job that `rollout_job` made."""
    annotations: Mapping[str, Any] = job["metadata"]["annotations"]
    return str(annotations[names.ANNOTATION_ROLLOUT]), int(annotations[names.ANNOTATION_NUMBER])
