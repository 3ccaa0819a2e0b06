"""What a task may say about the pod of its rollout (isolation: Job)."""

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.scalars import FieldName


class PerTask(ApiModel):
    """Fields of the task rows that change the pod of a rollout. A row without the field changes nothing."""

    image_field: FieldName | None = Field(
        None, description="Field with the image of the container `agent`; one that allowedImages allows."
    )
    resources_field: FieldName | None = Field(
        None,
        description="Field with the resources of the container `agent`, e.g. {limits: {cpu: 500m, memory: 1Gi}}.",
    )
