from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.plan import StepPlan, plan_training_step, plan_validation


def tasks_of(seed: int, step: int, n_tasks: int, per_step: int) -> list[int]:
    plan = plan_training_step(seed=seed, step=step, n_tasks=n_tasks, tasks_per_step=per_step, group_size=2)
    return [group.task for group in plan.groups]


@given(st.integers(0, 2**31 - 1), st.integers(1, 40), st.integers(1, 15), st.integers(1, 6))
def test_every_pass_over_the_rows_takes_each_once(seed: int, n_tasks: int, per_step: int, steps: int) -> None:
    stream = [task for step in range(1, steps + 1) for task in tasks_of(seed, step, n_tasks, per_step)]
    for start in range(0, len(stream), n_tasks):
        piece = stream[start : start + n_tasks]
        assert len(set(piece)) == len(piece)
        assert all(0 <= task < n_tasks for task in piece)


@given(st.integers(0, 2**31 - 1), st.integers(1, 50))
def test_a_step_is_a_function_of_seed_and_step(seed: int, step: int) -> None:
    arguments = {"seed": seed, "step": step, "n_tasks": 7, "tasks_per_step": 5, "group_size": 3}
    plan = plan_training_step(**arguments)
    assert plan == plan_training_step(**arguments)
    assert StepPlan.from_json(plan.to_json()) == plan
    assert len(set(plan.rollouts)) == len(plan.rollouts) == 15


def test_names() -> None:
    plan = plan_training_step(seed=1, step=2, n_tasks=100, tasks_per_step=4, group_size=2)
    assert plan.name == "t000002"
    assert [group.group for group in plan.groups] == [f"t000002-0000000{i}" for i in range(4, 8)]
    assert plan.groups[0].rollouts == ("t000002-00000004-000", "t000002-00000004-001")


def test_the_order_differs_by_seed_and_by_pass() -> None:
    assert tasks_of(1, 1, 50, 50) != tasks_of(2, 1, 50, 50)
    assert tasks_of(1, 1, 50, 50) != tasks_of(1, 2, 50, 50)


def test_a_validation_takes_every_row_in_order() -> None:
    plan = plan_validation(mode="validation-sampled", step=4, n_tasks=3, repeats=2)
    assert plan.name == "s000004"
    assert [group.task for group in plan.groups] == [0, 1, 2]
    assert plan.rollouts[:3] == ("s000004-00000000-000", "s000004-00000000-001", "s000004-00000001-000")
    assert StepPlan.from_json(plan.to_json()) == plan
