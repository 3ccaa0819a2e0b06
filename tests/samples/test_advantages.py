"""Advantages against numbers worked by hand."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.samples.advantages import AdvantageKind, advantages, grpo, rloo, whiten


def test_grpo_by_hand() -> None:
    # mean 1/2, unbiased std sqrt(((1/2)^2 · 4) / 3) = 0.57735
    np.testing.assert_allclose(
        grpo(np.array([1.0, 0.0, 1.0, 0.0])), [0.866024, -0.866024, 0.866024, -0.866024], atol=1e-5
    )
    np.testing.assert_allclose(grpo(np.array([3.0, 1.0]), normalize_by_std=False), [1.0, -1.0])


def test_a_group_of_one_keeps_its_reward() -> None:
    np.testing.assert_allclose(grpo(np.array([0.7])), [0.7], atol=1e-5)
    np.testing.assert_allclose(rloo(np.array([0.7])), [0.7])


REWARDS = st.floats(-1e6, 1e6)


@given(REWARDS, st.integers(2, 40), st.booleans())
def test_equal_rewards_have_exactly_no_advantage(reward: float, n: int, normalize: bool) -> None:
    for kind in get_args(AdvantageKind):
        values = advantages({"a": np.full(n, reward)}, kind, normalize_by_std=normalize)
        assert np.array_equal(values["a"], np.zeros(n)), kind


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(REWARDS, st.integers(2, 12)), min_size=1))
def test_groups_without_spread_have_exactly_no_advantage_beside_others(groups: dict[str, tuple[float, int]]) -> None:
    given = {group: np.full(n, reward) for group, (reward, n) in groups.items()} | {"spread": np.array([0.1, 0.3, 0.7])}
    for kind in ("grpo", "rloo", "reinforce++-baseline"):
        values = advantages(given, kind)
        assert values["spread"].all()
        assert not any(values[group].any() for group in groups), kind


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1), REWARDS)
def test_a_step_without_spread_has_exactly_no_advantage(groups: dict[str, int], reward: float) -> None:
    values = advantages({group: np.full(n, reward) for group, n in groups.items()}, "reinforce++")
    assert not any(value.any() for value in values.values())


def test_rloo_by_hand() -> None:
    # 1 - (0 + 0.5)/2, 0 - (1 + 0.5)/2, 0.5 - (1 + 0)/2
    np.testing.assert_allclose(rloo(np.array([1.0, 0.0, 0.5])), [0.75, -0.75, 0.0])


def test_reinforce_takes_each_rollout_once() -> None:
    # all of the step: 1, 0, 0, 1: mean 1/2, unbiased variance 1/3
    values = advantages({"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0])}, "reinforce++")
    np.testing.assert_allclose(
        np.concatenate(list(values.values())), [0.8660254, -0.8660254, -0.8660254, 0.8660254], atol=1e-6
    )


def test_reinforce_baseline_subtracts_the_group_first() -> None:
    # group a centred: ±0.5, group b: 0, 0; mean 0, unbiased variance 0.5/3
    values = advantages({"a": np.array([1.0, 0.0]), "b": np.array([1.0, 1.0])}, "reinforce++-baseline")
    np.testing.assert_allclose(values["a"], [1.2247447, -1.2247447], atol=1e-5)
    np.testing.assert_allclose(values["b"], [0.0, 0.0])


def test_whitening_one_rollout_is_finite() -> None:
    assert np.isfinite(whiten({"a": np.array([2.0])})["a"]).all()


def test_no_groups() -> None:
    assert advantages({}, "reinforce++") == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_a_bug_here(bad: float) -> None:
    with pytest.raises(ValueError, match="group a: rewards must be finite"):
        advantages({"a": np.array([bad, 1.0])}, "grpo")
