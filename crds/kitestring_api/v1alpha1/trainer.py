"""The trainer of a run: its backend and the machines it takes."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.resources import Resources
from kitestring_api.v1alpha1.scalars import JsonObject, Scalar, Text, Token

Logger = Literal["console", "tensorboard", "wandb", "mlflow"]
OverrideKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _tensorboard() -> list[Logger]:
    return ["tensorboard"]


class Trainer(ApiModel):
    """What trains, and on what."""

    backend: Literal["verl", "collect"] = Field(
        "verl", description="verl: train with verl. collect: rollouts, traces and scores without updates."
    )
    mode: Literal["external", "managed"] = Field(
        "external",
        description="external: policy servers of their own, to which weights are pushed. managed: verl's own engines.",
    )
    device: Literal["cpu", "cuda"] = Field("cuda", description="What the updates are computed on.")
    nodes: int = Field(1, ge=1, le=1024, description="Nodes of the trainer; one pod each.")
    gpus_per_node: int = Field(0, ge=0, le=64, description="GPUs of each node; 0 with device: cpu only.")
    image: Text | None = Field(None, description="Image of the trainer; absent: that of this version.")
    resources: Resources | None = Field(None, description="Resources of each node's container, its GPUs aside.")
    template: JsonObject | None = Field(
        None, description="Pod template laid over ours by strategic merge: volumes, tolerations, node selector, …"
    )
    overrides: dict[OverrideKey, Scalar] = Field(
        default_factory=dict,
        max_length=256,
        description="Settings of verl by dotted key; one that Kitestring sets itself is refused.",
    )
    loggers: list[Logger] = Field(
        default_factory=_tensorboard,
        max_length=4,
        description="Where verl's metrics go.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    project: Token | None = Field(None, description="Project under which the loggers file the run.")
