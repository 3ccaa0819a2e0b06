"""Name, namespace, labels of an object, as every Kubernetes object has them."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.scalars import Name

RESOURCE_NAME_LENGTH = 40
"""Longest name of a TrainingRun or RolloutPool: the names of their pods, made from it, must fit in 63 characters."""

RESOURCE_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS label that starts with a letter, as names of Services must."""

ResourceName = Annotated[
    str, StringConstraints(min_length=1, max_length=RESOURCE_NAME_LENGTH, pattern=RESOURCE_NAME_PATTERN)
]


class ObjectMeta(ApiModel):
    """Metadata of a resource. Beyond those named here, the fields that a cluster adds are accepted and kept."""

    model_config = ConfigDict(strict=False)

    name: ResourceName = Field(description="Name of the resource, unique in its namespace.")
    namespace: Name | None = Field(None, description="Namespace; absent: the current one.")
    labels: dict[str, str] = Field(default_factory=dict, description="Labels.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations.")
    uid: str | None = Field(None, description="Set by the cluster.")
    generation: int | None = Field(None, description="Set by the cluster: counts the changes of the spec.")
    resource_version: str | None = Field(None, description="Set by the cluster.")
    creation_timestamp: str | None = Field(None, description="Set by the cluster.")
    deletion_timestamp: str | None = Field(None, description="Set by the cluster.")
    deletion_grace_period_seconds: int | None = Field(None, description="Set by the cluster.")
    generate_name: str | None = Field(None, description="Set by the cluster.")
    self_link: str | None = Field(None, description="Set by old clusters.")
    finalizers: list[str] = Field(default_factory=list, description="Finalizers.")
    owner_references: list[dict[str, Any]] = Field(default_factory=list, description="Owners.")
    managed_fields: list[dict[str, Any]] = Field(default_factory=list, description="Set by the cluster.")
