"""What a user sees while a run goes on: a live table in a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kitestring_rollout.protocol.run_status import RunStatus, ValidationResult

Output = Literal["auto", "plain", "json"]


class View(Protocol):
    """Where a run says how it goes: `status` several times a second, `step` once per line of the metrics file."""

    def note(self, text: str) -> None: ...
    def step(self, line: Mapping[str, Any]) -> None: ...
    def status(self, status: RunStatus) -> None: ...
    def result(self, result: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_view(output: Output) -> View:
    """The view for `--output`; `auto` is live in a terminal and plain elsewhere."""
    if output == "json":
        return JsonView()
    if output == "auto" and sys.stdout.isatty():
        return LiveView()
    return PlainView(lambda line: print(line, flush=True))  # noqa: T201


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def validation_line(result: ValidationResult) -> str:
    how = "greedy" if result.mode == "validation-greedy" else "sampled"
    tools = "" if result.tool_use is None else f", tool use {result.tool_use:.2f}"
    when = "before training" if result.step == 0 else f"after step {result.step}"
    return f"validation {when} ({how}): reward {figure(result.reward)} over {result.scored} of {result.rollouts}{tools}"


def step_line(line: Mapping[str, Any], steps: int) -> str:
    """A step, from its line in the metrics file."""
    failed = {name: count for name, count in line.get("rollouts_by_class", {}).items() if name != "Succeeded"}
    seconds = line.get("seconds", {})
    parts = [
        f"step {line['step']}/{steps}: reward {figure(line.get('reward_mean'))}",
        f"KL {figure(line.get('agreement_kl_k3_nats'), 5)}",
        f"entropy {figure(line.get('entropy_nats'))}",
        f"{figure(line.get('tokens_per_second'), 0)} tokens/s",
        f"{line['rollouts_counted']} of {line['rollouts_planned']} rollouts count"
        + (f" ({', '.join(f'{name} {count}' for name, count in sorted(failed.items()))})" if failed else ""),
        "skipped" if line.get("skipped") else "",
        f"{line['step_seconds']:.1f} s"
        + (
            f" ({', '.join(f'{name} {value:.1f}' for name, value in seconds.items() if value >= 0.05)})"
            if seconds
            else ""
        ),
    ]
    return ", ".join(part for part in parts if part)


class PlainView:
    """A line for each thing that happened: validations, steps, notes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._steps = 0
        self._validations = 0
        self._phase = ""
        self._degraded = False

    def note(self, text: str) -> None:
        self._write(text)

    def step(self, line: Mapping[str, Any]) -> None:
        self._write(step_line(line, self._steps))

    def status(self, status: RunStatus) -> None:
        self._steps = status.steps
        for result in status.validation[self._validations :]:
            self._write(validation_line(result))
        self._validations = len(status.validation)
        if status.phase == "Starting" and self._phase != status.phase:
            self._write("trainer starting")
        if status.degraded and not self._degraded:
            self._write(f"degraded: {status.message}")
        self._degraded = status.degraded
        self._phase = status.phase

    def result(self, result: Mapping[str, Any]) -> None:
        self._write(result_text(result))

    def close(self) -> None:
        """Nothing is held open."""


class JsonView:
    """One object, at the end. Notes go to standard error."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def step(self, line: Mapping[str, Any]) -> None:
        """Programs read the metrics file while the run goes on."""

    def status(self, status: RunStatus) -> None:
        """Programs read the metrics file while the run goes on."""

    def result(self, result: Mapping[str, Any]) -> None:
        print(json.dumps(result), flush=True)  # noqa: T201

    def close(self) -> None:
        """Nothing is held open."""


class LiveView:
    """Progress bars of run and step, and the figures of the last steps, redrawn in place."""

    def __init__(self) -> None:
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._steps: TaskID = self._progress.add_task("steps", total=None)
        self._rollouts: TaskID = self._progress.add_task("rollouts", total=None)
        self._plain = PlainView(self._console.print)
        self._live = Live(self._progress, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        self._plain.note(text)

    def step(self, line: Mapping[str, Any]) -> None:
        self._plain.step(line)

    def status(self, status: RunStatus) -> None:
        done = max(0, status.step - (0 if status.phase in ("PushingWeights", "Finished") else 1))
        self._progress.update(self._steps, total=status.steps, completed=done)
        counts = status.rollouts
        self._progress.update(self._rollouts, total=counts.planned or None, completed=counts.finished)
        self._plain.status(status)
        self._live.update(Group(self._figures(status), self._progress))

    def result(self, result: Mapping[str, Any]) -> None:
        self.close()
        self._plain.result(result)

    def close(self) -> None:
        self._live.stop()

    @staticmethod
    def _figures(status: RunStatus) -> Table:
        counts = status.rollouts
        table = Table.grid(padding=(0, 3))
        table.add_row(
            Text(status.phase, style="bold"),
            f"step {status.step}/{status.steps}",
            f"reward {figure(status.reward)}",
            f"KL {figure(status.kl, 5)}",
            f"{figure(status.tokens_per_second, 0)} tokens/s",
            f"{counts.running} running, {counts.retried} retried, {counts.excluded} excluded",
            "" if status.eta_seconds is None else f"{status.eta_seconds:.0f} s left",
        )
        return table


def result_text(result: Mapping[str, Any]) -> str:
    """The closing lines of a run, from the object of `--output json`."""
    before, after = result.get("validation_before") or {}, result.get("validation_after") or {}
    lines = [f"{result['phase']}: {result.get('reason') or ''} {result.get('message') or ''}".rstrip(" :")]
    for mode in ("greedy", "sampled"):
        if mode in before and mode in after:
            first, last = before[mode]["reward"], after[mode]["reward"]
            lines.append(f"  validation ({mode}): reward {figure(first)} before, {figure(last)} after training")
    if result.get("checkpoint"):
        lines.append(f"  checkpoint: {result['checkpoint']}")
    if result.get("report"):
        lines.append(f"  report:     {result['report']}")
    lines.append(f"  {result['steps']} steps, {result['tokens']:,} tokens, {result['wall_seconds']:.0f} s")
    return "\n".join(lines)
