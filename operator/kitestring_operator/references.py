"""What a run names in its namespace: Secrets, ConfigMaps, volumes, other runs, a queue. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from kitestring_api import names
from kitestring_api.v1alpha1 import TrainingRunSpec
from kitestring_api.v1alpha1.references import ObjectReference
from kitestring_operator.observed import MissingReference

STORAGE_KEYS: Final = ("accessKeyId", "secretAccessKey")
ReferencedKind = Literal["Secret", "ConfigMap", "PersistentVolumeClaim", "TrainingRun", "LocalQueue", "PriorityClass"]


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that a run names, and the keys that it must have."""

    field: str
    kind: ReferencedKind
    name: str
    keys: tuple[str, ...] = ()


def references(spec: TrainingRunSpec) -> Iterator[Reference]:
    """Everything that must be there before the run can start, but its pool."""
    yield from _of_policies(spec)
    yield from _of_tasks(spec)
    if spec.storage is not None:
        yield from _secret("spec.storage.credentialsSecretRef", spec.storage.credentials_secret_ref)
        if spec.storage.credentials is not None:
            for part in ("traces", "agent", "weights", "trainer"):
                yield from _secret(f"spec.storage.credentials.{part}", getattr(spec.storage.credentials, part))
    if spec.scheduling.queue_name is not None:
        yield Reference("spec.scheduling.queueName", "LocalQueue", spec.scheduling.queue_name)
    if spec.scheduling.priority_class_name is not None:
        yield Reference("spec.scheduling.priorityClassName", "PriorityClass", spec.scheduling.priority_class_name)


def missing_of(reference: Reference, found: dict[str, Any] | None) -> MissingReference | None:
    """What is missing of a reference, given the object that was found."""
    if found is None:
        return MissingReference(reference.field, reference.kind, reference.name)
    if reference.kind == names.KIND_TRAINING_RUN:
        has_checkpoint = bool((found.get("status") or {}).get("checkpoint"))
        return None if has_checkpoint else MissingReference(reference.field, reference.kind, reference.name)
    there = {**(found.get("data") or {}), **(found.get("binaryData") or {})}
    absent = next((key for key in reference.keys if key not in there), None)
    return None if absent is None else MissingReference(reference.field, reference.kind, reference.name, absent)


def _of_policies(spec: TrainingRunSpec) -> Iterator[Reference]:
    for index, policy in enumerate(spec.policies):
        where = f"spec.policies[{index}]"
        if policy.endpoint is not None and policy.endpoint.api_key_secret_ref is not None:
            ref = policy.endpoint.api_key_secret_ref
            yield Reference(f"{where}.endpoint.apiKeySecretRef", "Secret", ref.name, (ref.key,))
        model = policy.model
        if model is None:
            continue
        if model.pvc is not None:
            yield Reference(f"{where}.model.pvc", "PersistentVolumeClaim", model.pvc.claim_name)
        if model.s3 is not None:
            yield from _secret(f"{where}.model.s3.credentialsSecretRef", model.s3.credentials_secret_ref)
        if model.hugging_face is not None and model.hugging_face.token_secret_ref is not None:
            token = model.hugging_face.token_secret_ref
            yield Reference(f"{where}.model.huggingFace.tokenSecretRef", "Secret", token.name, (token.key,))
        if model.checkpoint_of is not None:
            yield Reference(f"{where}.model.checkpointOf", "TrainingRun", model.checkpoint_of.training_run)


def _of_tasks(spec: TrainingRunSpec) -> Iterator[Reference]:
    for split, source in (("train", spec.tasks.train), ("validation", spec.tasks.validation)):
        if source is None:
            continue
        where = f"spec.tasks.{split}"
        if source.config_map is not None:
            yield Reference(f"{where}.configMap", "ConfigMap", source.config_map.name, (source.config_map.key,))
        if source.pvc is not None:
            yield Reference(f"{where}.pvc", "PersistentVolumeClaim", source.pvc.claim_name)
        if source.s3 is not None:
            yield from _secret(f"{where}.s3.credentialsSecretRef", source.s3.credentials_secret_ref)


def _secret(field: str, reference: ObjectReference | None) -> Iterator[Reference]:
    if reference is not None:
        yield Reference(field, "Secret", reference.name, STORAGE_KEYS)
