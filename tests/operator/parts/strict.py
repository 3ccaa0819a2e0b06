"""Whether a manifest is what the Kubernetes API says: every field known, each value of its type, all that is required.

Read from the models of the official client, which are made from the API's own OpenAPI document.
"""

from __future__ import annotations

from typing import Any

from kubernetes import client
from pydantic import BaseModel, ValidationError

_MODELS: dict[tuple[str, str], type[BaseModel]] = {
    ("v1", "ConfigMap"): client.V1ConfigMap,
    ("v1", "Secret"): client.V1Secret,
    ("v1", "Service"): client.V1Service,
    ("apps/v1", "StatefulSet"): client.V1StatefulSet,
    ("apps/v1", "Deployment"): client.V1Deployment,
    ("batch/v1", "Job"): client.V1Job,
    ("networking.k8s.io/v1", "NetworkPolicy"): client.V1NetworkPolicy,
    ("policy/v1", "PodDisruptionBudget"): client.V1PodDisruptionBudget,
}


def faults(manifest: dict[str, Any]) -> list[str]:
    """What is wrong, a line each: path and fault."""
    model = _MODELS[manifest["apiVersion"], manifest["kind"]]
    try:
        read = model.model_validate(manifest)
    except ValidationError as error:
        return [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    written = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    # the models also take the names of Python, which the API does not
    return [] if written == manifest else [f"read as something else: {written}"]
