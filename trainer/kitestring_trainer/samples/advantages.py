"""Advantages: one number per rollout, from the rewards of whole groups, before any row is dropped.

verl computes all but GRPO per row, which is wrong for rollouts of several rows; here a rollout counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

AdvantageKind = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline"]
Rewards = Mapping[str, NDArray[np.float64]]

GRPO_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8


def advantages(
    groups: Rewards, kind: AdvantageKind, *, normalize_by_std: bool = True
) -> dict[str, NDArray[np.float64]]:
    """`groups`: group → rewards [n] of its counted rollouts; the result has the same keys and shapes.

    Rewards without spread have exactly no advantage, so that nothing is learned from them: their mean may differ from
    them by a rounding error, which an optimizer that scales gradients would follow. Raises ValueError for a reward that
    is not finite (they are refused long before).
    """
    for group, rewards in groups.items():
        if not np.all(np.isfinite(rewards)):
            raise ValueError(f"group {group}: rewards must be finite, found {rewards.tolist()}")
    if kind == "grpo":
        return {group: grpo(rewards, normalize_by_std=normalize_by_std) for group, rewards in groups.items()}
    if kind == "rloo":
        return {group: rloo(rewards) for group, rewards in groups.items()}
    if kind == "reinforce++":
        return whiten({group: rewards.astype(np.float64) for group, rewards in groups.items()})
    # What is centred by group has mean 0 up to a rounding error, which groups without spread must not get.
    whitened = whiten({group: centred(rewards.astype(np.float64)) for group, rewards in groups.items()})
    return {group: values if np.ptp(groups[group]) else np.zeros_like(values) for group, values in whitened.items()}


def centred(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """R_i minus the mean; exactly 0 where all are equal."""
    return rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)


def grpo(rewards: NDArray[np.float64], *, normalize_by_std: bool = True) -> NDArray[np.float64]:
    """(R_i - mean) / (std + 1e-6), std unbiased; a group of one has mean 0 and std 1.

    Matches verl 0.9.1 `compute_grpo_outcome_advantage`; without the division it is Dr. GRPO's.
    """
    rewards = rewards.astype(np.float64)
    if len(rewards) == 1:
        return rewards / (1.0 + GRPO_EPSILON) if normalize_by_std else rewards
    scale = float(rewards.std(ddof=1)) + GRPO_EPSILON if normalize_by_std else 1.0
    return np.asarray(centred(rewards) / scale, np.float64)


def rloo(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """R_i minus the mean of the others = n/(n-1) · (R_i - mean); a group of one keeps R.

    Matches verl 0.9.1 `compute_rloo_outcome_advantage` with one row per rollout.
    """
    rewards = rewards.astype(np.float64)
    n = len(rewards)
    return rewards if n == 1 else centred(rewards) * n / (n - 1)


def whiten(groups: Rewards) -> dict[str, NDArray[np.float64]]:
    """(x - mean) / sqrt(var + 1e-8) over all rollouts of the step, var unbiased, each rollout once; 0 without spread.

    verl's `masked_whiten` takes each token once, so that long rollouts set the scale; REINFORCE++ (arXiv 2501.03262,
    §"batch advantage normalisation") speaks of samples.
    """
    if not groups:
        return {}
    everything = np.concatenate([np.asarray(values, np.float64) for values in groups.values()])
    if not np.ptp(everything):
        return {group: np.zeros(len(values)) for group, values in groups.items()}
    scale = np.sqrt(everything.var(ddof=1) + WHITEN_EPSILON)
    return {group: (np.asarray(values, np.float64) - everything.mean()) / scale for group, values in groups.items()}
