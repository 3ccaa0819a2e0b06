"""All that decides the weights of the small policy, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from word_problems import Variant

STEPS: dict[Variant, int] = {"ci": 350, "full": 900}


@dataclass(frozen=True)
class Recipe:
    """The warm start: AdamW with a linear warm-up and a linear decay over the last part of the steps.

    The first `clean_share` of the steps learn from conversations whose protocol is clean, the others from flawed ones.
    `threads` is here since sums over another number of threads round differently.
    """

    variant: Variant
    seed: int
    steps: int
    threads: int = 2
    batch: int = 16
    learning_rate: float = 6e-3
    warm_up_steps: int = 50
    decay_share: float = 0.3
    clean_share: float = 0.6
    weight_decay: float = 0.01
    grad_clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of `step`, counted from 0."""
        rising = (step + 1) / self.warm_up_steps
        falling = (self.steps - step) / (self.steps * self.decay_share)
        return self.learning_rate * min(1.0, rising, falling)

    def flawed(self, step: int) -> bool:
        return step >= self.clean_share * self.steps
