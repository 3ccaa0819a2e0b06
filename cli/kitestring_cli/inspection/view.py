"""A summary for people: tables in a terminal and in pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kitestring_cli.inspection.advice import advise
from kitestring_cli.inspection.summary import Loss, Summary
from kitestring_cli.run.views import figure
from kitestring_cli.show.printable import one_line

ROWS = 24
"""Steps that the table shows; of longer runs evenly spaced ones."""
_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {"Succeeded": "bold green", "Failed": "bold red", "Unfinished": "bold yellow"}
_REASON_WIDTH = 100


def sparkline(values: Sequence[float | None]) -> str:
    """A bar for each value, the lowest to the highest; a blank where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _BARS[round((value - low) * scale)] for value in values)


def show_summary(console: Console, summary: Summary, lines: Sequence[Mapping[str, Any]]) -> None:
    """`lines` are those of the metrics file."""
    console.print(_head(summary), soft_wrap=True)
    _validation(console, summary)
    _steps(console, summary, lines)
    _rollouts(console, summary)
    _costs(console, summary)
    for note in summary.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print()
    console.print("[bold]next[/bold]")
    for advice in advise(summary):
        console.print(Text(f"  {one_line(advice.text, 400)}"), soft_wrap=True)
        if advice.command is not None:
            console.print(Text(f"    {advice.command}", style="cyan"), soft_wrap=True)


def _head(summary: Summary) -> Text:
    head = Text()
    head.append(summary.run, style="bold")
    head.append("  ")
    head.append(summary.phase, style=_PHASE_STYLES.get(summary.phase, "bold cyan"))
    why = ": ".join(text for text in (summary.reason, summary.message) if text)
    if why:
        head.append(f"  {one_line(why, 500)}")
    head.append(f"\n{summary.steps} of {summary.steps_planned} steps, backend {summary.backend}")
    if summary.starts > 1:
        head.append(f", started {summary.starts} times")
    return head


def _validation(console: Console, summary: Summary) -> None:
    if not summary.validation:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("validation")
    for title in ("before", "after", "change", "tool use after"):
        table.add_column(title, justify="right")
    table.add_column("")
    for mode in dict.fromkeys(result.mode for result in summary.validation):
        before, after = summary.before.get(mode), summary.after.get(mode)
        first, last = before.reward if before else None, after.reward if after else None
        change = "" if first is None or last is None else f"{last - first:+.3f}"
        style = "" if not change else "green" if change.startswith("+") and last != first else "red"
        curve = sparkline([result.reward for result in summary.validations(mode)])
        tools = after.tool_use if after else None
        table.add_row(
            mode.removeprefix("validation-"),
            figure(first),
            figure(last),
            Text(change, style=style if last != first else ""),
            figure(tools, 2),
            Text(curve, style="cyan"),
        )
    console.print()
    console.print(table)


def _steps(console: Console, summary: Summary, lines: Sequence[Mapping[str, Any]]) -> None:
    if not summary.rewards:
        return
    rewards = list(summary.rewards.values())
    console.print()
    console.print(Text.assemble("reward per step  ", (sparkline(rewards), "cyan")))
    by_step = {line["step"]: line for line in lines}
    steps = _spaced(list(summary.rewards))
    cells = [[cell(by_step.get(step, {})) for step in steps] for cell in _COLUMNS.values()]
    # A run without updates has no figures of updates: no column of dashes for them.
    shown = {title: column for title, column in zip(_COLUMNS, cells, strict=True) if set(column) != {figure(None)}}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("step", "reward", *shown):
        table.add_column(title, justify="right")
    for place, step in enumerate(steps):
        line = by_step.get(step, {})
        table.add_row(
            str(step),
            figure(summary.rewards[step]),
            *(column[place] for column in shown.values()),
            style="yellow" if line.get("degraded") or line.get("skipped") else "",
        )
    console.print(table)
    if len(summary.rewards) > ROWS:
        console.print(Text(f"{ROWS} of {len(summary.rewards)} steps; all are in metrics.jsonl", style="dim"))


def _counted(line: Mapping[str, Any]) -> str:
    planned = line.get("rollouts_planned")
    return figure(None) if planned is None else f"{line.get('rollouts_counted')}/{planned}"


def _per_call(line: Mapping[str, Any]) -> float | None:
    calls = line.get("calls_total")
    return line["completion_tokens"] / calls if calls else None


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "counted": _counted,
    "tok/reply": lambda line: figure(_per_call(line), 1),
    "entropy": lambda line: figure(line.get("entropy_nats")),
    "KL": lambda line: figure(line.get("agreement_kl_k3_nats"), 6),
    "corr.": lambda line: figure(line.get("agreement_correlation"), 6),
    "seconds": lambda line: figure(line.get("step_seconds"), 1),
}
"""Of the table of steps, after step and reward, from a line of the metrics file."""


def _spaced(steps: list[int]) -> list[int]:
    if len(steps) <= ROWS:
        return steps
    return [steps[round(index * (len(steps) - 1) / (ROWS - 1))] for index in range(ROWS)]


def _rollouts(console: Console, summary: Summary) -> None:
    if not summary.rollouts:
        return
    classes = ", ".join(f"{count} {klass}" for klass, count in summary.rollouts.items())
    excluded = sum(loss.count for loss in summary.excluded)
    console.print()
    console.print(
        Text(
            f"rollouts  {classes}; {summary.counted} counted, {excluded} excluded, {summary.retried} attempts retried"
            + (f", {summary.superseded} superseded" if summary.superseded else "")
        ),
        soft_wrap=True,
    )
    _reasons(console, "excluded", summary.excluded)
    _reasons(console, "failed but counted", summary.failures)
    if summary.skipped_steps:
        steps = ", ".join(map(str, summary.skipped_steps[:20]))
        console.print(Text(f"skipped steps (no group to learn from): {steps}", style="yellow"))


def _reasons(console: Console, title: str, losses: Iterable[Loss]) -> None:
    for loss in list(losses)[:8]:
        reason = one_line(loss.reason, _REASON_WIDTH)
        console.print(
            Text(f"  {title}: {loss.count} × {loss.klass}: {reason}  (e.g. {loss.example})", style="yellow"),
            soft_wrap=True,
        )


def _costs(console: Console, summary: Summary) -> None:
    console.print()
    if summary.correlation_min is not None or summary.kl_max_nats is not None:
        console.print(
            f"agreement of sampler and trainer: correlation ≥ {figure(summary.correlation_min, 6)}, "
            f"KL ≤ {figure(summary.kl_max_nats, 6)} nats"
        )
    tokens = summary.prompt_tokens + summary.completion_tokens
    if tokens:
        console.print(
            f"tokens    {tokens:,} ({summary.prompt_tokens:,} prompt, {summary.completion_tokens:,} completion), "
            f"{summary.trained_tokens:,} trained"
        )
    if summary.seconds:
        phases = ", ".join(f"{escape(phase)} {seconds:.1f}" for phase, seconds in summary.seconds.items())
        wall = f" of {summary.wall_seconds:.0f} s in all" if summary.wall_seconds is not None else ""
        console.print(f"seconds   {phases}{wall}")
    if summary.checkpoint is not None:
        console.print(Text(f"checkpoint {summary.checkpoint}"), soft_wrap=True)
