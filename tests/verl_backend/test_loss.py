"""The loss against numbers worked by hand, and its gradient against Eq. 16 in plain torch."""

import math

import pytest
import torch

from kitestring_trainer.learner import LossConfig
from kitestring_trainer.verl_backend.loss import RolloutLoss, response_positions, rollout_loss

LOSS = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def parts(ratio: float, advantage: float, config: LossConfig = LOSS, **terms: float):
    tensors = {name: torch.tensor([value], dtype=torch.float64) for name, value in terms.items()}
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1)
    out = rollout_loss(log_prob, zero, torch.tensor([advantage], dtype=torch.float64), one, config, **tensors)
    out.loss.backward()
    return out, log_prob.grad.item()


# ratio, advantage, loss, its derivative by log p, whether the clip cut the gradient off
TABLE = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.1, 2.0, -2.2, -2.2, False),
    (1.5, 2.0, -2.56, 0.0, True),  # clipped at 1.28
    (0.5, 2.0, -1.0, -1.0, False),  # worse than before: no clip from below for A > 0
    (1.0, -2.0, 2.0, 2.0, False),
    (0.5, -2.0, 1.6, 0.0, True),  # clipped at 0.8
    (2.0, -2.0, 4.0, 4.0, False),
    (4.0, -2.0, 6.0, 0.0, True),  # dual clip: at most 3 |A|
    (1.0, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "clipped"), TABLE)
def test_by_hand(ratio, advantage, loss, slope, clipped):
    out, gradient = parts(ratio, advantage)
    assert out.loss.item() == pytest.approx(loss)
    assert gradient == pytest.approx(slope)
    assert bool(out.clipped) is clipped
    assert out.tokens.item() == (advantage != 0)


def test_entropy_and_kl_carry_the_rollouts_weight():
    config = LossConfig(entropy_coefficient=0.1, kl_coefficient=0.5)
    out, gradient = parts(1.0, 0.0, config, weight=0.25, entropy=2.0, ref_log_prob=math.log(2.0))
    # -0.1 · 0.25 · 2 + 0.5 · 0.25 · (2 - ln 2 - 1); d k3 / d log p = 1 - r = -1
    assert out.loss.item() == pytest.approx(-0.05 + 0.125 * (1 - math.log(2)))
    assert gradient == pytest.approx(0.5 * 0.25 * -1.0)


def test_a_term_without_its_tensor_is_a_bug():
    with pytest.raises(ValueError, match="needs the weight"):
        parts(1.0, 1.0, LossConfig(entropy_coefficient=0.1))


def test_masked_tokens_count_nowhere():
    log_prob = torch.tensor([0.0, 5.0], requires_grad=True)
    advantage, mask = torch.tensor([1.0, 1.0]), torch.tensor([1, 0])
    out = rollout_loss(log_prob, torch.zeros(2), advantage, mask, LOSS)
    out.loss.backward()
    assert (out.loss.item(), out.tokens.item(), out.clipped.item()) == (-1.0, 1.0, 0.0)
    assert log_prob.grad.tolist() == [-1.0, 0.0]


def test_positions_of_responses():
    # rows of 3 + 2 and 1 + 3 tokens: the outputs before each response token
    assert response_positions(torch.tensor([0, 5, 9]), torch.tensor([0, 2, 5])).tolist() == [2, 3, 5, 6, 7]


def jagged(parts):
    return torch.nested.as_nested_tensor([torch.as_tensor(p) for p in parts], layout=torch.jagged)


@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5]], [[0, 4], [1, 2], [3, 5]]], ids=["whole", "micro-batches"])
def test_uneven_rows_weigh_as_equation_16_says(split):
    """Figure 5's example: A 50 + 100, B 3 · 30, C 40 tokens; each rollout has exactly a third of the loss."""
    lengths = [50, 100, 30, 30, 30, 40]
    rollout_of, tokens = [0, 0, 1, 1, 1, 2], [150, 90, 40]
    advantages = [0.7, -1.3, 0.4]
    generator = torch.Generator().manual_seed(0)
    new = [torch.randn(2 + n, generator=generator) * 0.3 - 1 for n in lengths]
    old = [torch.randn(n, generator=generator) * 0.3 - 1 for n in lengths]

    whole = [x.clone().requires_grad_() for x in new]
    expected = torch.zeros(())
    for i, length in enumerate(lengths):
        ratio = torch.exp(whole[i][1 : 1 + length] - old[i])
        a = advantages[rollout_of[i]]
        token = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
        token = torch.minimum(token, torch.tensor(-3.0 * a)) if a < 0 else token
        expected = expected + token.sum() / tokens[rollout_of[i]] / 3
    expected.backward()

    mine, total = [x.clone().requires_grad_() for x in new], 0.0
    for members in split:
        scales = [advantages[rollout_of[i]] / tokens[rollout_of[i]] / 3 for i in members]
        data = {
            "input_ids": jagged([torch.zeros(2 + lengths[i], dtype=torch.int64) for i in members]),
            "loss_mask": jagged([torch.ones(lengths[i], dtype=torch.int64) for i in members]),
            "old_log_probs": jagged([old[i] for i in members]),
            "advantages": jagged([torch.full((lengths[i],), s) for i, s in zip(members, scales, strict=True)]),
            "dp_size": 1,
        }
        loss, metrics = RolloutLoss(LOSS)({"log_probs": jagged([mine[i] for i in members])}, data)
        loss.backward()
        total += loss.item()
        assert metrics["loss_tokens"].aggregate() == sum(lengths[i] for i in members)
    assert total == pytest.approx(expected.item(), rel=1e-5)
    for got, wanted in zip(mine, whole, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-8)
