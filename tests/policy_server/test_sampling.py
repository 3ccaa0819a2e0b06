"""Drawing tokens: distributions by hand, and a row's draw independent of its neighbours."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitestring_trainer.policy_server.sampling import Sampling, draw

LOGITS = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()


def _one(logits: torch.Tensor, sampling: Sampling, seed: int = 0) -> tuple[int, float]:
    drawn = draw(logits, [sampling], [Random(seed)])
    return drawn.tokens[0], drawn.logprobs[0]


def _frequencies(sampling: Sampling, draws: int = 4000) -> tuple[list[float], dict[int, float]]:
    noise = Random(1)
    drawn = draw(LOGITS.expand(draws, -1), [sampling] * draws, [noise] * draws)
    counts = [drawn.tokens.count(token) / draws for token in range(4)]
    return counts, dict(zip(drawn.tokens, drawn.logprobs, strict=True))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.2, 0.3, 0.4]),
        # p^2 / sum of p^2 = 1, 4, 9, 16 thirtieths
        (Sampling(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (Sampling(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        # 0.4 and 0.3 do not reach 0.75; with 0.2 they do.
        (Sampling(top_p=0.75), [0, 2 / 9, 3 / 9, 4 / 9]),
        # top_k comes first: of (3/7, 4/7) the larger one alone covers half.
        (Sampling(top_k=2, top_p=0.5), [0, 0, 0, 1]),
        (Sampling(temperature=0.5, top_p=0.8), [0, 0, 9 / 25, 16 / 25]),
    ],
)
def test_frequencies_and_logprobs_are_those_of_the_processed_distribution(
    sampling: Sampling, expected: list[float]
) -> None:
    frequencies, logprobs = _frequencies(sampling)
    assert frequencies == pytest.approx(expected, abs=0.03)
    for token, logprob in logprobs.items():
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)
        assert expected[token] > 0


def test_greedy_reports_the_untempered_logprob() -> None:
    token, logprob = _one(LOGITS, Sampling(temperature=0.0))
    assert token == 3
    assert logprob == pytest.approx(math.log(0.4))


def test_alternatives_are_those_that_can_be_drawn() -> None:
    drawn = draw(LOGITS, [Sampling(top_k=2, alternatives=3)], [Random(0)])
    tokens = [token for token, _ in drawn.alternatives[0]]
    assert tokens == [3, 2]
    assert [value for _, value in drawn.alternatives[0]] == pytest.approx([math.log(4 / 7), math.log(3 / 7)])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_draws_the_same_alone_and_among_others(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, 20, generator=generator) * 3
    how = [
        Sampling(
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.3])),
            top_k=data.draw(st.sampled_from([0, 1, 5])),
            alternatives=data.draw(st.integers(0, 3)),
        )
        for _ in range(rows)
    ]
    together = draw(logits, how, [Random(row) for row in range(rows)])
    for row in range(rows):
        alone = draw(logits[row : row + 1], [how[row]], [Random(row)])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[row], abs=1e-6)
        mine, theirs = alone.alternatives.get(0, []), together.alternatives.get(row, [])
        assert [token for token, _ in mine] == [token for token, _ in theirs]
        assert [value for _, value in mine] == pytest.approx([value for _, value in theirs], abs=1e-6)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    logits = torch.stack([torch.full((4,), math.nan), LOGITS[0]])
    drawn = draw(logits, [Sampling()] * 2, [Random(0), Random(0)])
    assert not math.isfinite(drawn.logprobs[0])
    assert (drawn.tokens[1], drawn.logprobs[1]) == pytest.approx(_one(LOGITS, Sampling()))
