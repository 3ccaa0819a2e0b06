"""What `kitestring try` prints: the conversation while it goes on, then what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from kitestring_api.names import CLASS_SUCCEEDED
from kitestring_api.v1alpha1 import RolloutPoolSpec
from kitestring_cli.show.printable import one_line, printable
from kitestring_cli.show.story import AttemptStory, attempt_json
from kitestring_cli.show.view import block, show_call, show_output, verdict
from kitestring_cli.try_rollout.findings import Limit, Rows
from kitestring_cli.try_rollout.stage import Played
from kitestring_rollout.traces.attempts import LostAttempt
from kitestring_rollout.traces.records import CallRecord
from kitestring_trainer.tasks import Task

LOG_LINES = 20
_EXPECTED = 200
"""Characters of a task or an expected answer that are shown."""


@dataclass(frozen=True)
class Outcome:
    """Everything that is said at the end."""

    row: int
    task: Task
    played: Played
    rows: Rows
    limits: Sequence[Limit]
    warnings: Sequence[str]
    scorer: str

    @property
    def klass(self) -> str:
        return self.played.result.final.ending.klass

    @property
    def reward(self) -> float | None:
        return self.played.result.final.ending.reward

    @property
    def good(self) -> bool:
        """Whether the agent ended well and was rewarded, with whatever reward."""
        return self.klass == CLASS_SUCCEEDED and self.reward is not None


def show_start(console: Console, row: int, task: Task, model: str) -> None:
    shown = ", ".join(f"{name}: {one_line(str(value), _EXPECTED)}" for name, value in task.visible.items())
    console.print(Text.assemble(("task ", "bold"), (str(row), "bold"), f"  {shown or '(no visible field)'}"))
    console.print(Text(model, style="dim"), soft_wrap=True)


def show_new_call(console: Console, call: CallRecord, earlier: Sequence[CallRecord]) -> None:
    show_call(console, call, earlier, {}, ids=False)


def show_outcome(console: Console, outcome: Outcome) -> None:
    played, ending = outcome.played, outcome.played.result.final.ending
    console.print()
    if played.attempt is not None and played.attempt.end is not None:
        show_output(console, played.attempt.end)
    console.print(verdict(ending.klass, ending.reason, ending.reward, ending.reward_source))
    block(console, "scorer", outcome.scorer, "dim", indent=0)
    if not outcome.good and played.finish is not None and played.finish.log_tail.strip():
        console.print(Text(f"\nlast lines of the agent's output and errors ({played.finish.log_bytes:,} bytes):"))
        for line in printable(played.finish.log_tail).splitlines()[-LOG_LINES:]:
            console.print(Text(f"  {line}", style="red"))
    rows = outcome.rows
    console.print()
    block(console, "rows", _rows_text(rows), "bold", indent=0)
    for reason in (*rows.dropped, *rows.excluded):
        block(console, "", f"not trained on: {one_line(reason, 300)}", "", indent=0)
    used = ", ".join(f"{limit.name} {_number(limit.used)} of {_number(limit.allowed)}" for limit in outcome.limits)
    block(console, "limits", used, "bold", indent=0)
    for warning in outcome.warnings:
        block(console, "warning", one_line(warning, 600), "bold yellow", indent=0)


def _rows_text(rows: Rows) -> str:
    if not rows.rows:
        return rows.sentence
    between = f", {rows.masked} between them masked" if rows.masked else ""
    return f"{rows.sentence}\n{rows.prompt} tokens of prompt, {rows.trained} trained{between}"


def story_of(played: Played) -> AttemptStory | None:
    if played.attempt is None:
        return None
    lost = played.attempt.reason if isinstance(played.attempt, LostAttempt) else None
    return AttemptStory(played.attempt.attempt, played.calls, played.attempt.end, lost, counts=lost is None)


def outcome_json(outcome: Outcome) -> Mapping[str, Any]:
    """The object of `--output json`."""
    played, ending = outcome.played, outcome.played.result.final.ending
    story = story_of(played)
    return {
        "task": outcome.row,
        "visible": outcome.task.visible,
        "class": ending.klass,
        "reason": ending.reason,
        "reward": ending.reward,
        "reward_source": ending.reward_source,
        "scorer": outcome.scorer,
        "rows": asdict(outcome.rows),
        "limits": {limit.name: {"used": limit.used, "allowed": limit.allowed} for limit in outcome.limits},
        "warnings": list(outcome.warnings),
        "attempt": attempt_json(story, {}, ids=False) if story is not None else None,
        "log_tail": played.finish.log_tail if played.finish is not None else None,
    }


def scorer_text(pool: RolloutPoolSpec, task: Task, played: Played) -> str:
    """How the reward came about: who scored, by what, and what it said."""
    reward = pool.reward
    said = f": {one_line(played.scored.reason, 300)}" if played.scored is not None and played.scored.reason else ""
    if reward.source == "builtin" and reward.builtin is not None:
        builtin, row = reward.builtin, {**task.visible, **task.hidden}
        against = builtin.expected_field or builtin.pattern_field
        wanted = row.get(against) if against is not None else builtin.pattern
        field = f" (field {against})" if against is not None else ""
        return f"{builtin.kind} against {one_line(repr(wanted), _EXPECTED)}{field}{said}"
    if reward.source == "command" and reward.command is not None:
        return f"command {one_line(' '.join(reward.command.command), _EXPECTED)}{said}"
    if reward.source == "scorer" and reward.scorer is not None:
        return f"scorer {one_line(' '.join((*reward.scorer.command, *reward.scorer.args)), _EXPECTED)}{said}"
    if reward.source == "exitCode":
        return f"exit code{said}"
    return f"the agent's own reward{said}"


def _number(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
