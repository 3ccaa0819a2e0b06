"""Rows as columns, what is refused, what counts as something to train on, and the report of a step."""

import dataclasses
import math

import numpy as np
import pytest

from kitestring_trainer.learner import LearnerConfig, OptimizerConfig, StepBatch
from kitestring_trainer.verl_backend.agreement import agreement
from kitestring_trainer.verl_backend.report import report
from kitestring_trainer.verl_backend.rows import check_batch, columns, has_signal
from tests.verl_backend.scripted import row


@pytest.fixture
def generator():
    return np.random.default_rng(0)


@pytest.fixture
def config(tmp_path):
    return LearnerConfig(
        model=tmp_path,
        weights=tmp_path,
        checkpoints=tmp_path,
        total_steps=1,
        updates_per_step=2,
        max_prompt_tokens=8,
        max_response_tokens=4,
        optimizer=OptimizerConfig(1e-3),
    )


def test_columns(generator):
    given = row("a", 2, 3, generator=generator, advantage=-2.0, weight=0.25, trained=[0, 2])
    out = columns([given], no_op_rows=1, no_op_token=7, with_weights=True)
    assert out["input_ids"].values.tolist() == [*given.prompt_ids, *given.response_ids, 7, 7]
    assert out["input_ids"].offsets.tolist() == [0, 5, 7]
    assert out["position_ids"].values.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert out["loss_mask"].values.tolist() == [1, 0, 1, 0]
    assert out["advantages"].values.tolist() == [-0.5, 0.0, -0.5, 0.0]
    assert out["loss_weights"].values.tolist() == [0.25, 0.0, 0.25, 0.0]
    assert out["loss_mask"].offsets.tolist() == [0, 3, 4]
    assert "loss_weights" not in columns([given], 0, 7, with_weights=False)


def test_what_an_update_is_made_of(generator):
    silent = row("a", 2, 3, generator=generator, advantage=0.0)
    assert not has_signal(silent, every_token_counts=False)
    assert has_signal(silent, every_token_counts=True)
    assert not has_signal(row("a", 2, 3, generator=generator, trained=[]), every_token_counts=True)
    assert has_signal(row("a", 2, 3, generator=generator, trained=[1]), every_token_counts=False)


WRONG = {
    "mini-batch 2 of 2": {"mini_batch": 2},
    "9 prompt tokens": {"prompt_ids": np.arange(9)},
    "advantage nan": {"advantage": math.nan},
    "loss weight -1": {"loss_weight": -1.0},
    "neither 0 nor 1": {"response_mask": np.array([2, 0, 0])},
    "not finite": {"rollout_logprobs": np.array([-np.inf, 0, 0], dtype=np.float32)},
    "shapes": {"current_version": np.ones(2, dtype=bool)},
}


@pytest.mark.parametrize(("message", "change"), WRONG.items(), ids=WRONG)
def test_a_broken_row_is_refused(generator, config, message, change):
    fine = row("a", 2, 3, generator=generator)
    check_batch(StepBatch(1, (fine,), 2), config)
    with pytest.raises(ValueError, match=message):
        check_batch(StepBatch(1, (fine, dataclasses.replace(fine, **change)), 2), config)


def test_a_batch_with_other_updates_than_the_run_is_refused(config):
    with pytest.raises(ValueError, match="has 3 updates, the run 2"):
        check_batch(StepBatch(1, (), 3), config)


def test_agreement_by_hand():
    sampler, trainer = np.log([0.5, 0.25, 0.9]), np.log([0.25, 0.5, 0.1])
    out = agreement(sampler, trainer, np.array([True, True, False]))
    assert out.tokens == 2
    assert out.correlation == pytest.approx(-1.0)
    assert out.kl_k1 == pytest.approx(0.0)  # mean of ln 2 and -ln 2
    assert out.kl_k3 == pytest.approx((0.5 - 1 + 2 - 1) / 2)
    assert out.largest_difference == pytest.approx(math.log(2))
    same = agreement(sampler, sampler, np.ones(3, dtype=bool))
    assert (same.correlation, same.kl_k1, same.kl_k3) == (pytest.approx(1.0), 0.0, 0.0)


def test_agreement_where_correlation_is_not_defined():
    nothing = agreement(np.zeros(2), np.zeros(2), np.zeros(2, dtype=bool))
    assert (nothing.tokens, nothing.correlation, nothing.kl_k3) == (0, None, None)
    alike = np.full(3, -0.5, dtype=np.float32)
    assert agreement(alike, alike, np.ones(3, dtype=bool)).correlation is None


def test_report_counts_current_tokens_only_and_sums_updates(generator):
    old = dataclasses.replace(
        row("a", 2, 2, generator=generator, current=False), rollout_logprobs=np.array([-9, -9], dtype=np.float32)
    )
    new = dataclasses.replace(
        row("b", 3, 2, generator=generator, trained=[1]), rollout_logprobs=np.array([0, -0.5], dtype=np.float32)
    )
    trained = np.array([-1, -1, -7, -0.25], dtype=np.float32)
    entropy = np.array([1, 2, 50, 3], dtype=np.float32)
    updates = {
        "loss": [0.5, 0.25],
        "grad_norm": [1.0, 3.0],
        "lr": [1e-3],
        "loss_tokens": [3.0, 5.0],
        "loss_clipped": [1.0, 1.0],
        "loss_log_ratio": [0.8, 0.8],
    }
    out = report(StepBatch(4, (old, new), 2), trained, entropy, updates, {"update_actor": 0.5})
    assert out.agreement.tokens == 1
    assert out.agreement.kl_k1 == pytest.approx(-0.25)
    assert (out.step, out.updates, out.loss, out.grad_norm) == (4, 2, (0.5, 0.25), (1.0, 3.0))
    assert (out.rows, out.tokens, out.trained_tokens) == (2, 9, 3)
    assert (out.clip_fraction, out.policy_kl, out.entropy) == (0.25, pytest.approx(0.2), 2.0)
    assert out.learning_rate == 1e-3
    assert out.raw["actor/grad_norm"] == 2.0
    assert out.raw["timing_s/update_actor"] == 0.5
    assert "training/rollout_actor_probs_pearson_corr" not in out.raw


def test_report_of_a_step_without_rows():
    nothing = np.zeros(0, dtype=np.float32)
    out = report(StepBatch(1, (), 2), nothing, nothing, {}, {})
    assert (out.updates, out.loss, out.trained_tokens, out.agreement.tokens) == (0, (), 0, 0)
