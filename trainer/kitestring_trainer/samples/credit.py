"""Credit: how a rollout's reward is spread over its transitions."""

from __future__ import annotations

from collections.abc import Sequence

from kitestring_trainer.samples.transitions import Transition


def identical_credit(transitions: Sequence[Transition], reward: float) -> list[float]:
    """The rollout's reward for every transition (arXiv 2508.03680, §3: the implemented assignment is the identity)."""
    return [reward] * len(transitions)
