"""Rewards posted by an agent: what is taken, and what becomes of a second one. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import orjson

from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.protocol.gateway_admin import PostedReward, RewardRule

MAX_NAME = 128


@dataclass(slots=True)
class Rewards:
    """The rewards of one attempt, by name: a second reward of a name falls under the rule for duplicates, a further
    name under the limit."""

    rule: RewardRule
    limit: int
    posted: dict[str, PostedReward] = field(default_factory=dict)

    def post(self, body: bytes, received_unix_nano: int) -> PostedReward:
        """Takes a reward and returns the one that now stands under its name; Refusal 403, 409, 422 or 429."""
        if not self.rule.accepted:
            raise Refusal(
                403,
                "reward_not_accepted",
                "the pool's reward source is not `agent`: rewards of the agent are not taken",
                kind="permission_error",
            )
        value, name = read_reward(body, self.rule)
        new = PostedReward(value=value, name=name, received_unix_nano=received_unix_nano)
        old = self.posted.get(name)
        if old is None:
            if len(self.posted) >= self.limit:
                raise Refusal(429, "rewards_limit", f"the attempt may post {self.limit} reward(s) and has done so")
            kept = new
        elif self.rule.duplicates == "refuse":
            raise Refusal(409, "reward_duplicate", f"a reward named {name!r} was posted before")
        elif self.rule.duplicates == "first":
            kept = old
        elif self.rule.duplicates == "last":
            kept = new
        else:
            kept = max(old, new, key=lambda reward: reward.value)
        self.posted[name] = kept
        return kept


def read_reward(body: bytes, rule: RewardRule) -> tuple[float, str]:
    """Value and name of a posted reward, or a Refusal 422 that says what is wrong with it."""
    try:
        parsed: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _unusable(f"the body is not JSON (NaN and Infinity are none): {error}") from None
    if not isinstance(parsed, dict):
        raise _unusable('the body must be an object like {"value": 1.0}')
    unknown = sorted(parsed.keys() - {"value", "name"})
    if unknown:
        raise _unusable(f"unknown field {unknown[0][:64]!r}; allowed: value, name")
    name = parsed.get("name", "reward")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise _unusable(f"name must be a text of 1 to {MAX_NAME} characters")
    return _number(parsed.get("value"), rule), name


def _number(value: Any, rule: RewardRule) -> float:
    if isinstance(value, bool):
        if rule.booleans == "refuse":
            raise _unusable("value is a boolean; the pool's `reward.booleans` refuses them: post a number")
    elif not isinstance(value, int | float):
        raise _unusable(f"value must be a number, not {'missing' if value is None else type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise _unusable("value must be finite")
    if rule.minimum is not None and number < rule.minimum:
        raise _unusable(f"value {number} is below the pool's minimum {rule.minimum}")
    if rule.maximum is not None and number > rule.maximum:
        raise _unusable(f"value {number} is above the pool's maximum {rule.maximum}")
    return number


def _unusable(message: str) -> Refusal:
    return Refusal(422, "reward_unusable", message, param="value")
