"""How rollouts are drawn: which pool runs them, how many per task and step, how the policy is sampled."""

from typing import Literal

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.references import ObjectReference
from kitestring_api.v1alpha1.rule import Rule


class AsyncRollouts(ApiModel):
    """Rollouts that run ahead of the updates."""

    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="How many policy versions a rollout may be behind; 0: each step waits for its rollouts.",
    )


class Sampling(ApiModel):
    """How trained policies are sampled in training. Validation samples the same way, and greedily besides."""

    temperature: float = Field(1.0, gt=0, le=10, description="Temperature that the trainer assumes.")
    max_tokens: int | None = Field(
        None, ge=1, le=10_000_000, description="Most tokens of one reply; absent: what the agent and the model allow."
    )
    nonconforming: Literal["enforce", "refuse"] = Field(
        "enforce",
        description="A call that asks for another temperature, top_p, top_k or penalty than the trainer assumes: serve "
        "it with the trainer's and flag it, or refuse it (400).",
    )


class Rollouts(ApiModel):
    """How rollouts are drawn."""

    rules = (
        Rule(
            "self.minGroupSize <= self.groupSize",
            "spec.rollouts.minGroupSize must not be greater than spec.rollouts.groupSize",
            "lower minGroupSize or raise groupSize",
            field=".minGroupSize",
        ),
    )

    pool_ref: ObjectReference = Field(description="The RolloutPool that runs the agent.")
    group_size: int = Field(8, ge=1, le=256, description="Rollouts of one task in one step: a group.")
    tasks_per_step: int = Field(16, ge=1, le=65536, description="Tasks of one step: its groups.")
    min_group_size: int = Field(
        2, ge=1, le=256, description="A group with fewer rollouts that count is skipped in this step."
    )
    async_: AsyncRollouts = Field(
        default_factory=AsyncRollouts, alias="async", description="Rollouts that run ahead of the updates."
    )
    sampling: Sampling = Field(default_factory=Sampling, description="How trained policies are sampled.")
    refill: bool = Field(False, description="Draw other tasks in the place of groups that were skipped.")
