"""The models of a run: policies that are trained, and frozen ones that agents or scorers also call."""

from typing import Annotated

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.references import BucketObject, KeyReference, VolumePath
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import Label, ModelName, Name, Path, Token, Url

ModuleSuffix = Annotated[str, StringConstraints(min_length=1, max_length=128)]


TAKEN_NAMES = ("trainer", "gateway", "collector", "ray", "rollout", "scorer", "keys", "storage", "config")
"""Parts of a run whose objects are called like those of a policy of that name would be."""


class HuggingFaceModel(ApiModel):
    """A model of the Hugging Face hub."""

    id: Token = Field(description="Id of the model, e.g. Qwen/Qwen2.5-0.5B-Instruct.")
    revision: Token | None = Field(None, description="Branch, tag or commit; absent: the default branch.")
    token_secret_ref: KeyReference | None = Field(None, description="Key of a Secret with the access token.")


class RunCheckpoint(ApiModel):
    """A checkpoint that another run exported."""

    training_run: Name = Field(description="Name of the run, in the same namespace.")
    step: int | None = Field(
        None, ge=0, description="Step of the checkpoint; absent: the last one when this run starts."
    )


class ModelSource(ApiModel):
    """Where the files of a model are: a Hugging Face folder (config, tokenizer with chat template, safetensors)."""

    rules = (
        Rule(
            "[has(self.path), has(self.pvc), has(self.s3), has(self.huggingFace), has(self.checkpointOf)]"
            ".exists_one(given, given)",
            "spec.policies[].model needs exactly one of path, pvc, s3, huggingFace and checkpointOf",
            "keep the one that says where the model is",
        ),
    )

    path: Path | None = Field(
        None, description="Folder: on this machine in a local run, in the image or a mounted volume in a cluster."
    )
    pvc: VolumePath | None = Field(None, description="Folder on a volume.")
    s3: BucketObject | None = Field(None, description="Prefix in object storage.")
    hugging_face: HuggingFaceModel | None = Field(None, description="A model of the Hugging Face hub.")
    checkpoint_of: RunCheckpoint | None = Field(None, description="A checkpoint of another run.")


class Lora(ApiModel):
    """Low-rank adapters: only they are trained; policy servers and checkpoints get the merged weights."""

    rules = (
        Rule(
            "!('all-linear' in self.targetModules) || size(self.targetModules) == 1",
            "spec.policies[].lora.targetModules must hold all-linear alone, or names of modules",
            "remove all-linear, or the names beside it",
            field=".targetModules",
        ),
    )

    rank: int = Field(16, ge=1, le=1024, description="Rank of the adapters.")
    alpha: int = Field(32, ge=1, le=8192, description="Scale of the adapters: they count alpha/rank.")
    target_modules: list[ModuleSuffix] = Field(
        default_factory=lambda: ["all-linear"],
        min_length=1,
        max_length=64,
        description="Ends of the names of the modules that get adapters, or all-linear.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )


class FrozenEndpoint(ApiModel):
    """A service that speaks the OpenAI API and is called, never trained."""

    url: Url = Field(description="Base URL, usually ending in /v1.")
    model: ModelName = Field(description="Name of the model at that service.")
    api_key_secret_ref: KeyReference | None = Field(None, description="Key of a Secret with the API key.")


class Policy(ApiModel):
    """A model that agents call by name: trained, or frozen (`train: false`: a judge, a user simulator)."""

    rules = (
        Rule(
            f"!(self.name in {list(TAKEN_NAMES)})",
            f"spec.policies[].name must not be one of {', '.join(TAKEN_NAMES)}, which are other parts of a run",
            "choose another name; agents may go on asking for this one if it stands in aliases",
            field=".name",
            reason="FieldValueForbidden",
        ),
        Rule(
            "has(self.model) != has(self.endpoint)",
            "spec.policies[] needs exactly one of model and endpoint",
            "write model for one that Kitestring serves, endpoint for one that is served elsewhere",
        ),
        Rule(
            "!self.train || !has(self.endpoint)",
            "spec.policies[].endpoint cannot be trained",
            "set train: false, or write model",
            field=".endpoint",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.train || !has(self.lora)",
            "spec.policies[].lora has no meaning with train: false",
            "remove lora, or set train: true",
            field=".lora",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.endpoint) || (!has(self.maxModelLen) && !has(self.toolParser))",
            "spec.policies[].maxModelLen and toolParser have no meaning with endpoint, whose service decides them",
            "remove them",
            field=".endpoint",
            reason="FieldValueForbidden",
        ),
    )

    name: Label = Field(description="Name by which agents ask for the model, and by which the run speaks of it.")
    train: bool = Field(True, description="Whether it is trained.")
    model: ModelSource | None = Field(None, description="Where its files are.")
    lora: Lora | None = Field(None, description="Train adapters of low rank; absent: all weights.")
    max_model_len: int | None = Field(
        None, ge=16, le=10_000_000, description="Longest prompt and reply together, in tokens; absent: the model's own."
    )
    tool_parser: Token | None = Field(
        None,
        description="How tool calls are read from the text: a parser of vLLM (hermes, llama3_json, …) or none; the CPU "
        "policy server knows hermes and none. Absent: none.",
    )
    endpoint: FrozenEndpoint | None = Field(None, description="The service that serves it (frozen models only).")
    aliases: list[ModelName] = Field(
        default_factory=list,
        max_length=16,
        description="Other names by which agents may ask for it, such as the one that is written in their code.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
