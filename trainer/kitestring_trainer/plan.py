"""The plan of a step: which tasks, in which groups, under which names. A pure function of the seed and the step.

A run that resumes needs nothing but the number of the step to go on exactly where it was in the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kitestring_api.names import MODE_TRAIN, MODE_TRY, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED
from kitestring_rollout.protocol.gateway_admin import Mode

LETTERS: Final[dict[Mode, str]] = {
    MODE_TRAIN: "t",
    MODE_VALIDATION_GREEDY: "g",
    MODE_VALIDATION_SAMPLED: "s",
    MODE_TRY: "y",
}
"""First letter of the names of a plan, its groups and its rollouts."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """The rollouts of one task in one step. `index` is the position in the stream of tasks, `task` the row from 0."""

    group: str
    index: int
    task: int
    rollouts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Every rollout of a step (mode train) or of one validation at a step."""

    mode: Mode
    step: int
    groups: tuple[PlannedGroup, ...]

    @property
    def name(self) -> str:
        """Name of the plan's objects below `state/plans/` and `state/commits/`, without suffix."""
        return plan_name(self.mode, self.step)

    @property
    def rollouts(self) -> tuple[str, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    def to_json(self) -> dict[str, Any]:
        groups = [
            {"group": g.group, "index": g.index, "task": g.task, "rollouts": list(g.rollouts)} for g in self.groups
        ]
        return {"mode": self.mode, "step": self.step, "groups": groups}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepPlan:
        groups = tuple(
            PlannedGroup(g["group"], int(g["index"]), int(g["task"]), tuple(g["rollouts"])) for g in data["groups"]
        )
        return cls(mode=data["mode"], step=int(data["step"]), groups=groups)


def plan_name(mode: Mode, step: int) -> str:
    return f"{LETTERS[mode]}{step:06d}"


def plan_training_step(*, seed: int, step: int, n_tasks: int, tasks_per_step: int, group_size: int) -> StepPlan:
    """Step `step` (from 1) draws the next `tasks_per_step` rows of an endless stream of the `n_tasks` rows.

    The stream is a fresh permutation for every pass over the rows, drawn without replacement within a pass.
    """
    first = (step - 1) * tasks_per_step
    groups = [
        _group(MODE_TRAIN, step, index, int(_permutation(seed, index // n_tasks, n_tasks)[index % n_tasks]), group_size)
        for index in range(first, first + tasks_per_step)
    ]
    return StepPlan(mode=MODE_TRAIN, step=step, groups=tuple(groups))


def plan_validation(*, mode: Mode, step: int, n_tasks: int, repeats: int) -> StepPlan:
    """One group for every validation row, in the order of the rows, of `repeats` rollouts each."""
    groups = tuple(_group(mode, step, row, row, repeats) for row in range(n_tasks))
    return StepPlan(mode=mode, step=step, groups=groups)


def _group(mode: Mode, step: int, index: int, task: int, size: int) -> PlannedGroup:
    name = f"{LETTERS[mode]}{step:06d}-{index:08d}"
    return PlannedGroup(name, index, task, tuple(f"{name}-{k:03d}" for k in range(size)))


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, n_tasks: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n_tasks)
