"""How many steps a run makes, however that changes meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.goal import StepGoal, StepsRefusedError


@given(
    steps=st.integers(1, 6),
    made=st.integers(0, 6),
    wishes=st.dictionaries(st.tuples(st.integers(0, 8), st.sampled_from(("during", "after"))), st.integers(1, 8)),
)
def test_a_run_ends_after_what_was_wanted_last(steps: int, made: int, wishes: dict[tuple[int, str], int]) -> None:
    """A learner's loop; wishes come while a step is in progress, and between two steps."""
    goal = StepGoal(steps, made)
    step, expected = made, max(steps, made)

    def wish(moment: str, begun: int) -> None:
        nonlocal expected
        wanted = wishes.get((step, moment))
        if wanted is None:
            return
        try:
            goal.want(wanted)
        except StepsRefusedError:
            assert wanted < begun
        else:
            expected = max(wanted, begun)

    last = made >= steps
    while step < goal.steps:
        wish("after", step + 1)
        step += 1
        wish("during", step)
        last = goal.settle(step)
        assert last == (step == expected), "the last step is known as such when it ends"
    assert (step, last, goal.steps) == (expected, True, expected)


def test_a_story() -> None:
    goal = StepGoal(5, made=0)
    assert not goal.settle(1)
    goal.want(1)
    assert goal.steps == 2, "the second step has begun"
    with pytest.raises(StepsRefusedError, match="1 steps are made already: steps cannot be 0"):
        goal.want(0)
    goal.want(9)
    assert not goal.settle(2)
    goal.want(3)
    assert goal.settle(3)
    with pytest.raises(StepsRefusedError, match="ending after step 3"):
        goal.want(4)
    goal.want(3)
    assert goal.steps == 3


def test_a_run_that_has_made_its_steps_makes_none() -> None:
    assert StepGoal(5, made=7).steps == 7
