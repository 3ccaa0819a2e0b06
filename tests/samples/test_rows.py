"""Prefix merging, against rows worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.traces.records import VersionSpan
from kitestring_trainer.samples.rows import RowLimits, merge_rows
from kitestring_trainer.samples.transitions import Transition

WIDE = RowLimits(prompt=1_000, response=1_000)


def transition(
    seq: int, prompt: list[int], response: list[int], *, choice: int = 0, excluded: str | None = None
) -> Transition:
    return Transition(
        rollout="r",
        attempt="a",
        seq=seq,
        choice=choice,
        policy="policy",
        agent=None,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=np.array([-0.1 * token for token in response], np.float32),
        versions=(VersionSpan("1.0", 0, len(response)),),
        finish_reason="stop",
        excluded=excluded,
    )


def test_two_turns_become_one_row_with_the_observation_masked() -> None:
    rows = merge_rows([transition(1, [1, 2], [3, 4]), transition(2, [1, 2, 3, 4, 9, 9], [5])], WIDE)
    assert len(rows) == 1
    row = rows[0]
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4, 9, 9, 5]
    assert row.response_mask.tolist() == [True, True, False, False, True]
    np.testing.assert_allclose(row.logprobs, [-0.3, -0.4, 0.0, 0.0, -0.5], rtol=1e-6)
    assert row.versions == (VersionSpan("1.0", 0, 2), VersionSpan("1.0", 4, 5))
    assert row.transitions == ((1, 0), (2, 0))


def test_interleaved_agents_keep_a_row_each() -> None:
    rows = merge_rows(
        [
            transition(1, [1, 1], [2]),
            transition(2, [7, 7], [8]),
            transition(3, [1, 1, 2, 5], [3]),
            transition(4, [7, 7, 8, 5], [9]),
        ],
        WIDE,
    )
    assert [row.transitions for row in rows] == [((1, 0), (3, 0)), ((2, 0), (4, 0))]


def test_a_template_that_strips_thoughts_begins_a_new_row() -> None:
    rows = merge_rows([transition(1, [1], [2, 3]), transition(2, [1, 3, 4], [5])], WIDE)
    assert [row.transitions for row in rows] == [((1, 0),), ((2, 0),)]
    assert rows[1].prompt_ids.tolist() == [1, 3, 4]


def test_two_samples_of_one_prompt_are_both_kept() -> None:
    rows = merge_rows([transition(1, [1], [2]), transition(2, [1], [2])], WIDE)
    assert [row.transitions for row in rows] == [((1, 0),), ((2, 0),)]


def test_the_choice_that_is_continued_grows_and_the_other_stays() -> None:
    rows = merge_rows(
        [transition(1, [1], [2], choice=0), transition(1, [1], [3], choice=1), transition(2, [1, 3, 4], [5])], WIDE
    )
    assert [row.transitions for row in rows] == [((1, 0),), ((1, 1), (2, 0))]


def test_excluded_transitions_are_in_no_row() -> None:
    assert merge_rows([transition(1, [1], [2], excluded="call undelivered")], WIDE) == []


@pytest.mark.parametrize(
    ("limits", "transitions", "expected"),
    [
        (RowLimits(1, 9), [transition(1, [1, 2], [3])], ["prompt of 2 tokens over maxRowTokens.prompt 1"]),
        (RowLimits(9, 1), [transition(1, [1], [2, 3])], ["response of 2 tokens over maxRowTokens.response 1"]),
        # the second turn would not fit into the first row's response, but is a row of its own
        (RowLimits(9, 2), [transition(1, [1], [2, 2]), transition(2, [1, 2, 2, 3], [4])], [None, None]),
    ],
)
def test_limits(limits: RowLimits, transitions: list[Transition], expected: list[str | None]) -> None:
    rows = merge_rows(transitions, limits)
    assert [row.dropped for row in rows] == expected
    assert all(row.trained_tokens == 0 for row in rows if row.dropped)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=12,
    )
)
def test_every_reply_is_trained_exactly_once_behind_its_own_prompt(
    turns: list[tuple[int, list[int], list[int]]],
) -> None:
    """Conversations 0..2 grow by (reply, observation); each reply stands once, behind its exact prompt."""
    contexts: dict[int, list[int]] = {0: [0], 1: [1, 1], 2: [0, 2]}
    made: list[Transition] = []
    for seq, (conversation, reply, observation) in enumerate(turns, start=1):
        made.append(transition(seq, contexts[conversation], reply))
        contexts[conversation] = contexts[conversation] + reply + observation
    rows = merge_rows(made, WIDE)
    seen = sorted(key for row in rows for key in row.transitions)
    assert seen == [(t.seq, t.choice) for t in made]
    by_key = {(t.seq, t.choice): t for t in made}
    for row in rows:
        context = np.concatenate([row.prompt_ids, row.response_ids])
        spans = iter(row.versions)
        for key in row.transitions:
            span = next(spans)
            start = len(row.prompt_ids) + span.start
            assert context[:start].tolist() == by_key[key].prompt_ids.tolist()
            assert row.response_ids[span.start : span.end].tolist() == by_key[key].response_ids.tolist()
            assert row.response_mask[span.start : span.end].all()
        assert row.response_mask.sum() == sum(len(by_key[key].response_ids) for key in row.transitions)
