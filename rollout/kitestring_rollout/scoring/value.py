"""What may be a reward: a finite number within the pool's bounds. Pure."""

from __future__ import annotations

import math
from typing import Any

from kitestring_api.v1alpha1.reward import Reward

SHOWN = 80


class ScoreError(Exception):
    """No reward can be had from what a scorer was given or said; the text says why, in one line."""


class ScorerAwayError(ScoreError):
    """There may be a reward, but nobody was there to say it: no answer for as long as the pool waits."""


def shown(value: object) -> str:
    """A value as it may stand in a message: on one line, cut."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def reward_value(value: Any, rules: Reward) -> float:
    """`value` as a reward; ScoreError when it is no finite number, a boolean (by `booleans`), or out of bounds."""
    if isinstance(value, bool):
        if rules.booleans == "refuse":
            raise ScoreError(
                f"the reward is {str(value).lower()}, a boolean; give a number, or set spec.reward.booleans: asNumber"
            )
    elif not isinstance(value, int | float):
        raise ScoreError(f"the reward must be a number, found {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ScoreError(f"the reward must be finite, found {number}")
    if rules.min is not None and number < rules.min:
        raise ScoreError(f"the reward {number:g} is below spec.reward.min {rules.min:g}")
    if rules.max is not None and number > rules.max:
        raise ScoreError(f"the reward {number:g} is above spec.reward.max {rules.max:g}")
    return number
