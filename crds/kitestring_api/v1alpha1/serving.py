"""What stands between agents and the policy: policy servers, gateway, collector of traces."""

from typing import Literal

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.resources import Resources
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import JsonObject, Text


class Inference(ApiModel):
    """The policy servers of the trained policies."""

    rules = (
        Rule(
            "self.backend == 'cpu' || !has(self.threads)",
            "spec.inference.threads has no meaning with backend: vllm",
            "remove threads, or use backend: cpu",
            field=".threads",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.backend == 'vllm' || size(self.extraArgs) == 0",
            "spec.inference.extraArgs has no meaning with backend: cpu",
            "remove extraArgs, or use backend: vllm",
            field=".extraArgs",
            reason="FieldValueForbidden",
        ),
    )

    backend: Literal["vllm", "cpu"] = Field("vllm", description="vllm: vLLM on GPUs. cpu: a small server for CPUs.")
    replicas: int = Field(1, ge=1, le=1024, description="Policy servers of each trained policy.")
    gpus_per_replica: int = Field(0, ge=0, le=64, description="GPUs of each server; 0 with backend: cpu only.")
    image: Text | None = Field(None, description="Image of the server; absent: that of this version.")
    extra_args: list[Text] = Field(default_factory=list, max_length=128, description="Further arguments of vLLM.")
    threads: int | None = Field(None, ge=1, le=1024, description="cpu: threads of each server; absent: 1.")
    resources: Resources | None = Field(None, description="Resources of each server, its GPUs aside.")
    template: JsonObject | None = Field(None, description="Pod template laid over ours by strategic merge.")


class Gateway(ApiModel):
    """The only way from an agent to a model."""

    replicas: int = Field(1, ge=1, le=256, description="Gateway processes; each attempt belongs to one of them.")
    resources: Resources | None = Field(None, description="Resources of each gateway process.")
    template: JsonObject | None = Field(None, description="Pod template laid over ours by strategic merge.")
    hold_seconds: int = Field(
        120,
        ge=0,
        le=3600,
        description="Longest time, in seconds, that calls are held while weights change before the server is paused "
        "with its state and goes on under the new weights.",
    )


class Collector(ApiModel):
    """What writes traces to storage before they are acknowledged."""

    kind: Literal["contrib", "builtin"] | None = Field(
        None,
        description="contrib: the stock OpenTelemetry Collector. builtin: ours, small; local runs always use it. "
        "Absent: what the installation says, builtin unless it was changed.",
    )
    resources: Resources | None = Field(None, description="Resources of the collector.")
    template: JsonObject | None = Field(None, description="Pod template laid over ours by strategic merge.")


class Traces(ApiModel):
    """The record of every call."""

    collector: Collector = Field(default_factory=Collector, description="What receives the traces.")
    record_contents: bool = Field(
        True, description="Record messages readably; false: token ids and figures only, which training needs."
    )
