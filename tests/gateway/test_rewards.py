"""Rewards posted by an agent: each odd one is refused visibly, a second one falls under the pool's rule."""

from __future__ import annotations

from typing import Any

import pytest

from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.rewards import Rewards
from kitestring_rollout.protocol.gateway_admin import RewardRule


def rewards(limit: int = 1, **rule: Any) -> Rewards:
    return Rewards(RewardRule(**{"accepted": True, **rule}), limit)


def refusal(kept: Rewards, body: bytes) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        kept.post(body, 1)
    return caught.value.status, caught.value.code


@pytest.mark.parametrize(
    "body",
    [
        b'{"value": NaN}',
        b'{"value": Infinity}',
        b'{"value": -Infinity}',
        b'{"value": 1e999}',
        b'{"value": "1.0"}',
        b'{"value": true}',
        b'{"value": null}',
        b'{"value": [1]}',
        b'{"value": {"reward": 1}}',
        b"{}",
        b"1.0",
        b"[1.0]",
        b"",
        b"\xff",
        b'{"value": 1.0, "reward": 2.0}',
        b'{"value": 1.0, "name": ""}',
        b'{"value": 1.0, "name": 7}',
        b'{"value": 1.5}',
        b'{"value": -0.5}',
    ],
)
def test_odd_rewards_are_422_and_nothing_is_kept(body: bytes) -> None:
    kept = rewards(minimum=0.0, maximum=1.0)
    assert refusal(kept, body) == (422, "reward_unusable")
    assert not kept.posted


def test_a_pool_that_takes_none_answers_403() -> None:
    assert refusal(rewards(accepted=False), b'{"value": 1.0}') == (403, "reward_not_accepted")


def test_booleans_count_as_numbers_where_the_pool_says_so() -> None:
    assert rewards(booleans="asNumber").post(b'{"value": true}', 1).value == 1.0


def test_integers_are_numbers() -> None:
    assert rewards().post(b'{"value": 1}', 1).value == 1.0


@pytest.mark.parametrize(
    ("rule", "values", "kept"), [("first", (0.5, 1.0), 0.5), ("last", (1.0, 0.5), 0.5), ("max", (1.0, 0.5), 1.0)]
)
def test_a_second_reward_under_each_rule(rule: str, values: tuple[float, float], kept: float) -> None:
    taken = rewards(duplicates=rule)
    for value in values:
        taken.post(b'{"value": %f}' % value, 1)
    assert [reward.value for reward in taken.posted.values()] == [kept]


def test_a_second_reward_is_refused_by_default() -> None:
    taken = rewards()
    taken.post(b'{"value": 0.5}', 1)
    assert refusal(taken, b'{"value": 1.0}') == (409, "reward_duplicate")
    assert taken.posted["reward"].value == 0.5


def test_names_are_limited() -> None:
    taken = rewards(limit=2)
    taken.post(b'{"value": 0.5}', 1)
    taken.post(b'{"value": 0.5, "name": "style"}', 1)
    assert refusal(taken, b'{"value": 0.5, "name": "third"}') == (429, "rewards_limit")
