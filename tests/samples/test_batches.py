"""Mini-batches and weights of Eq. 16, on an example worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitestring_rollout.traces.records import VersionSpan
from kitestring_trainer.samples.batches import SampleRules, ScoredRollout, make_samples
from kitestring_trainer.samples.rows import RowLimits
from kitestring_trainer.samples.transitions import Transition


def rules(**changes: object) -> SampleRules:
    values: dict[str, object] = {
        "advantage": "grpo",
        "normalize_by_std": True,
        "min_group_size": 2,
        "limits": RowLimits(prompt=100, response=500),
        "updates": 1,
    }
    return SampleRules(**(values | changes))  # type: ignore[arg-type]


def rollout(name: str, reward: float, lengths: list[int], *, group: str = "g", version: str = "1.0") -> ScoredRollout:
    """A rollout whose calls do not extend each other: a row of `lengths[i]` trained tokens each."""
    return ScoredRollout(
        rollout=name,
        group=group,
        reward=reward,
        transitions=tuple(
            Transition(
                rollout=name,
                attempt="a" + name,
                seq=seq,
                choice=0,
                policy="policy",
                agent=None,
                prompt_ids=np.array([seq, 7], np.int32),
                response_ids=np.full(length, 5, np.int32),
                logprobs=np.full(length, -0.5, np.float32),
                versions=(VersionSpan(version, 0, length),),
                finish_reason="stop",
                excluded=None,
            )
            for seq, length in enumerate(lengths, start=1)
        ),
    )


FIGURE_5 = [rollout("A", 1.0, [50, 100]), rollout("B", 0.0, [30, 30, 30]), rollout("C", 1.0, [40])]


def weight_of(samples: object, name: str) -> float:
    """Σ over the rollout's trained tokens of the weight each of them has in the loss."""
    rows = samples.batch.rows  # type: ignore[attr-defined]
    return sum(row.loss_weight * row.response_mask.sum() for row in rows if row.rollout == name)


def test_every_rollout_weighs_a_third_however_it_was_cut() -> None:
    samples = make_samples(1, "1.0", FIGURE_5, rules())
    for name in "ABC":
        assert weight_of(samples, name) == pytest.approx(1 / 3)


def test_a_dropped_row_changes_neither_advantages_nor_the_others() -> None:
    whole = make_samples(1, "1.0", FIGURE_5, rules())
    cut = make_samples(1, "1.0", FIGURE_5, rules(limits=RowLimits(prompt=100, response=99)))
    assert cut.rows_dropped == 1
    assert {row.rollout: row.advantage for row in cut.batch.rows} == {
        row.rollout: row.advantage for row in whole.batch.rows
    }
    for name in "ABC":
        assert weight_of(cut, name) == pytest.approx(1 / 3)
    dropped = [record for record in cut.records if record.excluded]
    assert [(r.rollout, r.seq, r.loss_weight, r.mini_batch) for r in dropped] == [("A", 2, 0.0, None)]


def test_a_rollout_without_rows_still_counts_in_n_and_in_the_baseline() -> None:
    silent = ScoredRollout("D", "g", 0.0, ())
    samples = make_samples(1, "1.0", [*FIGURE_5, silent], rules())
    assert weight_of(samples, "C") == pytest.approx(1 / 4)
    # rewards 1, 0, 1, 0: mean 1/2, unbiased std 0.57735
    assert {row.rollout: round(row.advantage, 4) for row in samples.batch.rows} == {"A": 0.866, "B": -0.866, "C": 0.866}


def test_small_groups_are_skipped_and_said_so() -> None:
    lonely = rollout("L", 1.0, [3], group="h")
    samples = make_samples(1, "1.0", [*FIGURE_5, lonely], rules())
    assert samples.skipped_groups == ("h",)
    assert weight_of(samples, "L") == 0
    assert [r.excluded for r in samples.records if r.rollout == "L"] == [
        "group has 1 counted rollouts, minGroupSize is 2"
    ]
    assert weight_of(samples, "A") == pytest.approx(1 / 3)


def test_only_tokens_of_the_trained_version_enter_the_correlation() -> None:
    samples = make_samples(
        2, "1.1", [rollout("A", 1.0, [3], version="1.1"), rollout("B", 0.0, [2], version="1.0")], rules()
    )
    current = {row.rollout: row.current_version.tolist() for row in samples.batch.rows}
    assert current == {"A": [True] * 3, "B": [False] * 2}


def test_nothing_to_train_on_is_an_empty_batch() -> None:
    samples = make_samples(1, "1.0", [], rules(updates=4))
    assert samples.batch.rows == ()
    assert samples.batch.updates == 4


rollouts = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]), st.lists(st.integers(1, 9), max_size=4)), max_size=24
)


@settings(max_examples=60)
@given(rollouts, st.integers(1, 5))
def test_whole_rollouts_and_exact_weights(made: list[tuple[int, float, list[int]]], updates: int) -> None:
    scored = [
        rollout(f"r{i:02d}", reward, lengths, group=f"g{group}") for i, (group, reward, lengths) in enumerate(made)
    ]
    samples = make_samples(1, "1.0", scored, rules(updates=updates))
    kept = [r for r in scored if r.group not in samples.skipped_groups]
    cells: dict[str, set[int]] = {}
    for row in samples.batch.rows:
        cells.setdefault(row.rollout, set()).add(row.mini_batch)
    assert all(len(cell) == 1 for cell in cells.values()), "a rollout is never split over updates"
    sizes = [len(kept) // updates + (1 if i < len(kept) % updates else 0) for i in range(updates)]
    for name in cells:
        n = 1 / weight_of(samples, name)
        assert round(n) in sizes, "N is the mini-batch's number of counted rollouts"
        assert n == pytest.approx(round(n))
    assert len(samples.records) == sum(len(r.transitions) for r in scored)
