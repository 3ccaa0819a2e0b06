"""Rollouts that a report shows: the same tasks before and after training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kitestring_api.names import MODE_TRAIN, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED
from kitestring_cli.inspection.attempts import calls_of, plan_attempts, proven_as_committed
from kitestring_cli.inspection.records import RunRecords
from kitestring_cli.show.messages import message_text
from kitestring_cli.show.printable import printable
from kitestring_cli.show.story import new_messages
from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_trainer.commits import CommittedRollout, StepCommit

TASKS = 4
"""Tasks that are shown."""
_CHARACTERS = 2000
_TURNS = 24


@dataclass(frozen=True)
class Turn:
    role: str
    text: str


@dataclass(frozen=True)
class Sample:
    """One rollout. `turns` are what was said, cut where it is long."""

    rollout: str
    when: str
    reward: float | None
    turns: tuple[Turn, ...]
    cut: int
    """Turns that are left out."""
    output: str | None


@dataclass(frozen=True)
class Comparison:
    """A task, and rollouts of it in the order of time."""

    task: int
    samples: tuple[Sample, ...]


def comparisons(records: RunRecords) -> list[Comparison]:
    """Of validation, sampled where there is such; of the first and the last training step where there is neither.

    Raises UserMistakeError.
    """
    for mode in (MODE_VALIDATION_SAMPLED, MODE_VALIDATION_GREEDY, MODE_TRAIN):
        steps = records.steps(mode)
        commits = [c for step in dict.fromkeys(steps[:1] + steps[-1:]) if (c := records.commit(mode, step)) is not None]
        if commits:
            return _compare(records, mode, commits)
    return []


def _compare(records: RunRecords, mode: Mode, commits: Sequence[StepCommit]) -> list[Comparison]:
    chosen = [{r.task: r for r in reversed(commit.rollouts) if r.digest is not None} for commit in commits]
    tasks = telling_tasks(*({task: r.reward for task, r in of_commit.items()} for of_commit in (chosen[0], chosen[-1])))
    samples: dict[int, list[Sample]] = {task: [] for task in tasks}
    for commit, of_commit in zip(commits, chosen, strict=True):
        rollouts = [of_commit[task] for task in tasks if task in of_commit]
        for rollout, attempt in _read(records, mode, commit, rollouts).items():
            sample = _sample(mode, commit.step, attempt)
            samples[next(r.task for r in rollouts if r.rollout == rollout)].append(sample)
    return [Comparison(task, tuple(of_task)) for task, of_task in samples.items() if of_task]


def telling_tasks(before: Mapping[int, float | None], after: Mapping[int, float | None]) -> list[int]:
    """At most `TASKS` tasks: those that gained most, and the one that is worst afterwards. Pure."""
    tasks = list(dict.fromkeys([*before, *after]))
    both = [task for task in tasks if task in before and task in after] or tasks
    gain = {task: (after.get(task) or 0.0) - (before.get(task) or 0.0) for task in both}
    best = sorted(both, key=lambda task: (-gain[task], task))
    worst = min(both, key=lambda task: (after.get(task) or 0.0, gain[task], task), default=None)
    return list(dict.fromkeys([*best[: TASKS - 1], *([worst] if worst is not None else []), *best[TASKS - 1 : TASKS]]))[
        :TASKS
    ]


def _read(
    records: RunRecords, mode: Mode, commit: StepCommit, rollouts: Collection[CommittedRollout]
) -> dict[str, ProvenAttempt]:
    names = {rollout.rollout for rollout in rollouts}
    found = plan_attempts(records, mode, commit.step, wanted=names.__contains__, contents=True)
    attempts = {rollout.rollout: proven_as_committed(rollout, found) for rollout in rollouts}
    return {rollout: attempt for rollout, attempt in attempts.items() if attempt is not None}


def _sample(mode: Mode, step: int, attempt: ProvenAttempt) -> Sample:
    turns: list[Turn] = []
    calls = calls_of(attempt)
    for place, call in enumerate(calls):
        _, messages = new_messages(call, calls[:place])
        turns.extend(Turn(str(message.get("role", "?")), _cut(message_text(message))) for message in messages)
        for choice in call.choices:
            if choice.message is not None:
                turns.append(Turn("assistant", _cut(message_text(choice.message))))
            elif choice.text is not None:
                turns.append(Turn("assistant", _cut(printable(choice.text))))
    when = "at the start" if step == 0 else f"after step {step}" if mode != MODE_TRAIN else f"in step {step}"
    output = attempt.end.output
    return Sample(
        rollout=attempt.end.rollout,
        when=when,
        reward=attempt.end.reward,
        turns=tuple(turns[:_TURNS]),
        cut=max(0, len(turns) - _TURNS),
        output=_cut(printable(output.strip())) if output is not None else None,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}… ({len(text) - _CHARACTERS:,} more characters)"
