"""The mathematics of an update: credit, advantages, loss, optimizer."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.rule import Rule

Advantage = Literal["grpo", "rloo", "reinforce++-baseline", "reinforce++", "gae"]
Momentum = Annotated[float, Field(ge=0, lt=1)]
AgentName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class KlPenalty(ApiModel):
    """A penalty for leaving the model that the run started from."""

    coefficient: float = Field(0.0, ge=0, le=100, description="Weight of the penalty; 0: none.")


class Loss(ApiModel):
    """The loss, a mean over rollouts of the mean over a rollout's trained tokens."""

    rules = (
        Rule(
            "self.dualClip > 1.0 + self.clipHigh",
            "spec.algorithm.loss.dualClip must be greater than 1 + clipHigh",
            "raise dualClip (3.0 is usual) or lower clipHigh",
            field=".dualClip",
        ),
    )

    kind: Literal["ppo", "cispo", "gspo"] = Field("ppo", description="ppo: clipped ratio per token.")
    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below at 1 - clipLow.")
    clip_high: float = Field(0.28, ge=0, le=100, description="The ratio is clipped above at 1 + clipHigh.")
    dual_clip: float = Field(
        3.0, gt=1, le=1000, description="Bound of the ratio where the advantage is negative (dual clip)."
    )
    entropy_coefficient: float = Field(0.0, ge=0, le=100, description="Weight of the entropy bonus; 0: none.")
    kl: KlPenalty = Field(default_factory=KlPenalty, description="Penalty for leaving the starting model.")


class Optimizer(ApiModel):
    """AdamW."""

    learning_rate: float = Field(1.0e-6, gt=0, le=1, description="Learning rate after the warm-up.")
    betas: list[Momentum] = Field(
        default_factory=lambda: [0.9, 0.999], min_length=2, max_length=2, description="Adam's two decay rates."
    )
    weight_decay: float = Field(0.01, ge=0, le=10, description="Weight decay.")
    grad_clip: float = Field(1.0, gt=0, le=1000, description="Largest norm of the gradient; it is scaled down to it.")
    warmup_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Steps over which the learning rate rises; steps without an update do not count, all updates of a "
        "step have the same rate.",
    )


class RowTokens(ApiModel):
    """Longest row that is trained. A rollout with a longer one keeps its place in the baseline; the row is dropped."""

    prompt: int = Field(4096, ge=1, le=10_000_000, description="Most tokens before the first trained one.")
    response: int = Field(4096, ge=1, le=10_000_000, description="Most tokens from the first trained one on.")


class Credit(ApiModel):
    """How the reward of a rollout is spread over its calls."""

    kind: Literal["identical", "discounted", "perCall"] = Field(
        "identical", description="identical: every call gets the reward of the rollout."
    )


class Selection(ApiModel):
    """Which calls are trained."""

    agents: list[AgentName] = Field(
        default_factory=list,
        max_length=64,
        description="Names of the agents whose calls are trained (header X-Kitestring-Agent); empty: all.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )


class IntermediateRewards(ApiModel):
    """Rewards of single calls, besides the reward of the rollout."""

    source: Literal["agent", "spans"] = Field(
        description="agent: posted by the agent for a call; spans: read from the agent's own spans, e.g. failed tools."
    )
    weight: float = Field(1.0, ge=-1000, le=1000, description="Weight of them beside the reward of the rollout.")


class Algorithm(ApiModel):
    """How rollouts become updates."""

    advantage: Advantage = Field(
        "grpo",
        description="grpo: reward less the mean of its group; rloo: less the mean of the others of its group; "
        "reinforce++: less the mean of the batch, over its standard deviation; reinforce++-baseline: less the mean of "
        "its group (0 for a group of one), whitened over the batch.",
    )
    normalize_by_std: bool = Field(
        True, description="grpo: divide by the standard deviation of the group. Has no meaning for other advantages."
    )
    loss: Loss = Field(default_factory=Loss, description="The loss.")
    updates_per_step: int = Field(
        1, ge=1, le=64, description="Optimizer updates made from one step; each takes whole rollouts."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    max_row_tokens: RowTokens = Field(default_factory=RowTokens, description="Longest row that is trained.")
    credit: Credit = Field(default_factory=Credit, description="How a reward is spread over calls.")
    select: Selection = Field(default_factory=Selection, description="Which calls are trained.")
    intermediate_rewards: IntermediateRewards | None = Field(None, description="Rewards of single calls.")
