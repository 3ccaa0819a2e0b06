"""`report.html` of a run: one file that needs nothing else, not even a network."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kitestring_api.errors import UserMistakeError
from kitestring_cli.inspection.advice import advise
from kitestring_cli.inspection.records import RunRecords
from kitestring_cli.inspection.summary import Summary, summarise
from kitestring_cli.report.numbers import number
from kitestring_cli.report.samples import Comparison, comparisons
from kitestring_cli.report.settings import settings
from kitestring_cli.run.folder import RunFolder, open_run_folder
from kitestring_cli.run.views import figure
from kitestring_cli.show.printable import printable

TEMPLATE = "report.html.jinja"


def write_report(run_folder: Path) -> Path:
    """Write the report of the run in this folder, whatever of it is there; the path of the page.

    Raises UserMistakeError for a folder that is no run's.
    """
    folder = open_run_folder(run_folder)
    page = render(folder)
    part = folder.report.with_suffix(".part")
    part.write_text(page, encoding="utf-8")
    part.replace(folder.report)
    return folder.report


def render(folder: RunFolder) -> str:
    """The page. Everything that agents, models and users wrote is escaped by the template."""
    # matplotlib takes most of a second to import: nothing that only might write a page is to wait for it.
    from kitestring_cli.report.curves import charts  # noqa: PLC0415

    records = RunRecords(folder)
    summary = summarise(records)
    shown, missing = _samples(records)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_without_controls, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"figure": figure, "number": number, "picture": Markup}
    template = environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        run=summary,
        tiles=tiles(summary),
        charts=charts(summary, records.figures.lines),
        comparisons=shown,
        no_comparisons=missing,
        settings=settings(folder.resolved),
        advice=advise(replace(summary, report=None)),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _without_controls(value: object) -> object:
    """What the template is to print; Markup is our own pictures."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _samples(records: RunRecords) -> tuple[list[Comparison], str]:
    """The conversations, or why there are none: traces that are damaged or gone do not take the figures with them."""
    try:
        return comparisons(records), "No rollout has been committed."
    except UserMistakeError as error:
        return [], str(error)


def tiles(summary: Summary) -> list[tuple[str, str, str]]:
    """(title, figure, remark) of what one wants to know first."""
    found = []
    for mode in ("validation-sampled", "validation-greedy"):
        before, after = summary.before.get(mode), summary.after.get(mode)
        if before is None and after is None:
            continue
        first, last = (result.reward if result else None for result in (before, after))
        change = f"{last - first:+.3f}" if first is not None and last is not None else ""
        found.append((f"validation, {mode.removeprefix('validation-')}", f"{figure(first)} → {figure(last)}", change))
    tools = next((r.tool_use for r in reversed(summary.validation) if r.tool_use is not None), None)
    if tools is not None:
        found.append(("tool use", f"{tools:.0%}", "share of the last validation's rollouts"))
    found.append(("steps", f"{summary.steps} of {summary.steps_planned}", _skipped(summary)))
    planned = sum(summary.rollouts.values())
    remark = f"{planned - summary.counted} excluded, {summary.retried} attempts retried"
    found.append(("rollouts counted", f"{summary.counted:,}", remark))
    tokens = summary.prompt_tokens + summary.completion_tokens
    found.append(("tokens", f"{tokens:,}", f"{summary.trained_tokens:,} trained"))
    if summary.correlation_min is not None:
        remark = f"lowest correlation; highest KL {figure(summary.kl_max_nats, 6)} nats"
        found.append(("sampler = trainer", f"{summary.correlation_min:.6f}", remark))
    if summary.wall_seconds is not None:
        minutes, seconds = divmod(round(summary.wall_seconds), 60)
        found.append(("wall time", f"{minutes} min {seconds} s" if minutes else f"{seconds} s", ""))
    return found


def _skipped(summary: Summary) -> str:
    return f"{len(summary.skipped_steps)} skipped" if summary.skipped_steps else ""
