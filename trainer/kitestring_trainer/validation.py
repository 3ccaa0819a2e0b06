"""Validation: when it is due, and what its rollouts say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kitestring_api.names import MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED
from kitestring_api.v1alpha1.schedule import Validation
from kitestring_rollout.protocol.run_status import ValidationResult
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.queue.rollouts import RolloutResult

ValidationMode = Literal["validation-greedy", "validation-sampled"]


def validation_due(step: int, steps: int, rules: Validation) -> bool:
    """Whether the policy is validated after `step` of `steps`; step 0 is before the first."""
    if step == 0:
        return rules.before
    if step >= steps:
        return rules.after
    return rules.every > 0 and step % rules.every == 0


def validation_modes(rules: Validation) -> tuple[tuple[ValidationMode, int], ...]:
    """(mode, rollouts of each task) of one validation."""
    modes: list[tuple[ValidationMode, int]] = []
    if rules.greedy:
        modes.append((MODE_VALIDATION_GREEDY, 1))
    if rules.sampled:
        modes.append((MODE_VALIDATION_SAMPLED, rules.sampled_repeats))
    return tuple(modes)


def validation_result(mode: ValidationMode, commit: StepCommit, results: Sequence[RolloutResult]) -> ValidationResult:
    """Mean reward over all tasks: the mean over tasks of the mean over a task's counted rollouts.

    A task without any is no part of the mean; `scored` says how many rollouts are.
    """
    by_task: dict[int, list[float]] = {}
    for rollout in commit.counted:
        assert rollout.reward is not None
        by_task.setdefault(rollout.task, []).append(rollout.reward)
    means = [sum(rewards) / len(rewards) for rewards in by_task.values()]
    return ValidationResult(
        step=commit.step,
        mode=mode,
        reward=sum(means) / len(means) if means else None,
        rollouts=len(commit.rollouts),
        scored=len(commit.counted),
        tool_use=tool_use(results),
    )


def tool_use(results: Sequence[RolloutResult]) -> float | None:
    """Share of proven rollouts in which the policy called a tool; None when no rollout was proven."""
    proofs = [result.proof for result in results if result.proof is not None]
    used = [any(choice.tool_calls for call in proof.calls for choice in call.choices) for proof in proofs]
    return sum(used) / len(used) if used else None
