"""The loss of one micro-batch: PPO, entropy and KL, each weighted per rollout (Eq. 16 of Agent Lightning's report).

    L = Σ_rollouts i 1/N · 1/T_i · Σ_tokens t of i  ( l_t - c_H · H_t + c_KL · k3_t )
    l_t = max(-A r, -A · clip(r, 1 - low, 1 + high)),  for A < 0 at most -A · dual_clip,  r = exp(log p - log p_old)

The weight 1/(N · T_i) is positive and the same for all tokens of a rollout, so it may stand inside clip and maximum:
the rows carry A · weight as their advantage. Micro-batches and ranks are summed, never averaged: verl averages
gradients over ranks, hence the factor `dp_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric

from kitestring_trainer.learner import LossConfig

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossParts:
    """Sums over the trained tokens of a micro-batch (scalars)."""

    loss: torch.Tensor
    tokens: torch.Tensor
    clipped: torch.Tensor
    log_ratio: torch.Tensor
    """Of log p_old - log p."""


def rollout_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    weighted_advantage: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    *,
    weight: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    ref_log_prob: torch.Tensor | None = None,
) -> LossParts:
    """All tensors [tokens] or [rows, tokens]; `weight` is 1/(N · T_i) and needed with entropy or KL only."""
    raw = log_prob - old_log_prob
    ratio = torch.exp(torch.clamp(raw, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    free = -weighted_advantage * ratio
    held = -weighted_advantage * torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
    token_loss = torch.maximum(free, held)
    bound = -weighted_advantage * config.dual_clip
    bounded = (weighted_advantage < 0) & (token_loss > bound)
    token_loss = torch.where(bounded, bound, token_loss)
    if config.entropy_coefficient:
        token_loss = token_loss - config.entropy_coefficient * _needed(weight) * _needed(entropy)
    if config.kl_coefficient:
        away = torch.clamp(_needed(ref_log_prob) - log_prob, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        token_loss = token_loss + config.kl_coefficient * _needed(weight) * (torch.exp(away) - away - 1)
    trained = mask.bool()
    zero = torch.zeros((), dtype=token_loss.dtype, device=token_loss.device)
    with torch.no_grad():
        moved = trained & (weighted_advantage != 0)
        clipped = moved & ((held > free) | bounded)
        log_ratio = torch.where(moved, -raw, zero).sum()
    return LossParts(torch.where(trained, token_loss, zero).sum(), moved.sum(), clipped.sum(), log_ratio)


def _needed(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise ValueError("an entropy or KL coefficient needs the weight and the term's own tensor")
    return tensor


@dataclass(frozen=True)
class RolloutLoss:
    """verl's loss function interface; sent to the training processes once (`set_loss_fn`)."""

    config: LossConfig

    def __call__(
        self, model_output: dict[str, Any], data: Any, dp_group: object = None
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """`model_output["log_probs"]`: nested [rows, P + R], position p holds the log-probability of token p + 1."""
        mask = data["loss_mask"]
        take = response_positions(data["input_ids"].offsets(), mask.offsets())
        dp_size = data["dp_size"]
        parts = rollout_loss(
            log_prob=model_output["log_probs"].values()[take],
            old_log_prob=data["old_log_probs"].values(),
            weighted_advantage=data["advantages"].values(),
            mask=mask.values(),
            config=self.config,
            weight=data["loss_weights"].values() if "loss_weights" in data.keys() else None,  # noqa: SIM118 - of a TensorDict
            entropy=model_output["entropy"].values()[take] if self.config.entropy_coefficient else None,
            ref_log_prob=data["ref_log_prob"].values() if self.config.kl_coefficient else None,
        )
        sums = {"loss_tokens": parts.tokens, "loss_clipped": parts.clipped, "loss_log_ratio": parts.log_ratio}
        # verl adds up micro-batches and averages over ranks.
        return parts.loss * dp_size, {
            name: Metric(value=value.float() * dp_size, aggregation=AggregationType.SUM) for name, value in sums.items()
        }


def response_positions(sequence_offsets: torch.Tensor, response_offsets: torch.Tensor) -> torch.Tensor:
    """Where the model's outputs for the response tokens are, in the concatenation of whole sequences.

    Args:
        sequence_offsets, response_offsets: [rows + 1], jagged offsets; a row's response is the end of its sequence.

    Returns:
        int64 [all response tokens]: one before each response token, since position p predicts token p + 1.
    """
    lengths = response_offsets.diff()
    last = sequence_offsets[1:] - 1
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    within = torch.arange(int(response_offsets[-1]), device=lengths.device) - response_offsets[:-1][row]
    return last[row] - lengths[row] + within
