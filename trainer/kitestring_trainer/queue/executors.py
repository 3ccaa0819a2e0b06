"""Executors of one rollout each (isolation: Job): what they are told to run, and the credential for it alone."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kitestring_api.images import is_allowed
from kitestring_trainer.tasks import Task

_SEPARATOR = "."
_PURPOSE = b"kitestring rollout credential\0"


@dataclass(frozen=True, slots=True)
class PerTask:
    """What a task may say of the pod that it runs in (RolloutPool `spec.perTask`, `spec.allowedImages`)."""

    image_field: str | None = None
    resources_field: str | None = None
    allowed_images: Sequence[str] = field(default=())
    """`*` at the end matches any rest."""


def image_of(task: Task, rules: PerTask) -> str | None:
    """The image that the task asks for; None: the pool's."""
    image = _value(task, rules.image_field)
    return image if isinstance(image, str) else None


def resources_of(task: Task, rules: PerTask) -> dict[str, Any] | None:
    """Requests and limits that the task asks for; None: the pool's."""
    resources = _value(task, rules.resources_field)
    return dict(resources) if isinstance(resources, Mapping) else None


def pod_problem(task: Task, rules: PerTask) -> str | None:
    """Why no pod can be made for the task, in one line; None when one can."""
    image, resources = _value(task, rules.image_field), _value(task, rules.resources_field)
    if image is not None and not isinstance(image, str):
        return f"has {image!r} in field {rules.image_field!r}, where spec.perTask.imageField wants the name of an image"
    if isinstance(image, str) and not is_allowed(image, rules.allowed_images):
        allowed = ", ".join(rules.allowed_images) or "none"
        return f"asks for image {image}, which spec.allowedImages does not allow ({allowed})"
    if resources is not None and not _is_resources(resources):
        return (
            f"has {resources!r} in field {rules.resources_field!r}, where spec.perTask.resourcesField wants "
            '{"requests": {…}, "limits": {…}} of quantities'
        )
    return None


def credential_for(rollout: str, key: str) -> str:
    """What leases, keeps and finishes this rollout and no other: its id and a code that only the queue can make."""
    return f"{rollout}{_SEPARATOR}{_code(rollout, key)}"


def rollout_of(credential: str, key: str) -> str | None:
    """The rollout that a credential is for; None for one that the queue did not make."""
    rollout, separator, code = credential.rpartition(_SEPARATOR)
    genuine = hmac.compare_digest(code.encode("utf-8", "surrogateescape"), _code(rollout, key).encode())
    return rollout if separator and genuine else None


def _code(rollout: str, key: str) -> str:
    return hmac.new(key.encode(), _PURPOSE + rollout.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _value(task: Task, name: str | None) -> Any:
    if name is None:
        return None
    return task.visible[name] if name in task.visible else task.hidden.get(name)


def _is_resources(value: Any) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"requests", "limits"}:
        return False
    return all(
        isinstance(amounts, Mapping)
        and all(isinstance(amount, str | int | float) and not isinstance(amount, bool) for amount in amounts.values())
        for amounts in value.values()
    )
