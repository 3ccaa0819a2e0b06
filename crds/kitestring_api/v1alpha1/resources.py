"""What a container asks for and may use."""

from typing import Annotated

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.scalars import Quantity

ResourceKind = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Amounts = dict[ResourceKind, Quantity]


class Resources(ApiModel):
    """Resources of the container that does the work of a part; a kind that is not named keeps our default."""

    requests: Amounts = Field(
        default_factory=dict, max_length=32, description="What is set aside, by kind: cpu, memory, ephemeral-storage, …"
    )
    limits: Amounts = Field(default_factory=dict, max_length=32, description="What it may use at most, by kind.")
