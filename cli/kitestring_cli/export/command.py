"""`kitestring export RUN`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_OK, MODE_TRAIN
from kitestring_cli.export.rows import MESSAGE_COLUMNS, TRANSITION_COLUMNS, message_rows, transition_rows
from kitestring_cli.export.writing import What, open_sink
from kitestring_cli.inspection.attempts import require_traces
from kitestring_cli.inspection.finding import find_run, run_argument
from kitestring_cli.inspection.records import MODES, RunRecords
from kitestring_rollout.protocol.gateway_admin import Mode

_STEPS = re.compile(r"(?P<first>\d+)?(?P<dash>-)?(?P<last>\d+)?")


@click.command()
@run_argument
@click.option("--to", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="FILE.jsonl, FILE.parquet.")
@click.option("--what", type=click.Choice(["transitions", "messages"]), default="transitions", show_default=True)
@click.option("--steps", metavar="A-B", default="", help="Steps to export: 3, 1-4, 5-.")
@click.option("--mode", "modes", type=click.Choice(MODES), multiple=True, help="Several may be given. [default: train]")
def export(  # noqa: PLR0917 - one parameter for each option
    run: str, runs: Path, to: Path | None, what: str, steps: str, modes: Sequence[str]
) -> int:
    """Write what a run recorded: every transition with its token ids and what became of it, or the conversations.

    RUN is a run as for `kitestring inspect`. Without --to, JSON lines go to standard output. Every attempt that is
    proven complete is there; `excluded` says why one was not trained on.
    """
    records = RunRecords(find_run(run, runs))
    require_traces(records)
    wanted = parse_steps(steps)
    plans = [
        (mode, step)
        for mode in cast(Sequence[Mode], modes or (MODE_TRAIN,))
        for step in records.planned_steps(mode)
        if wanted.start <= step < wanted.stop
    ]
    if not plans:
        known = ", ".join(map(str, records.planned_steps(MODE_TRAIN))) or "none"
        raise UserMistakeError(
            f"nothing to export: no such step of mode {', '.join(modes) or MODE_TRAIN}; steps: {known}"
        )
    notes: dict[str, None] = {}
    written = _write(records, plans, to, cast(What, what), notes)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if not written and what == "messages" and not records.config.spec.traces.record_contents:
        raise UserMistakeError(
            "the run recorded no contents (spec.traces.recordContents: false); --what transitions has the token ids"
        )
    if to is not None:
        click.echo(f"{written} {what} of {len(plans)} plans in {to}", err=True)
    return EXIT_OK


def _write(
    records: RunRecords, plans: Sequence[tuple[Mode, int]], to: Path | None, what: What, notes: dict[str, None]
) -> int:
    """The number of rows. What is to be said once goes into `notes`."""
    rows, columns = (transition_rows, TRANSITION_COLUMNS) if what == "transitions" else (message_rows, MESSAGE_COLUMNS)

    def remember(note: str) -> None:
        notes[note] = None

    written = 0
    progress = Progress(
        TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal,
    )  # fmt: skip
    with open_sink(to, what, columns) as sink, progress:
        for mode, step in progress.track(plans):
            for row in rows(records, mode, step, remember):
                sink.write(row)
                written += 1
    return written


def parse_steps(text: str) -> range:
    """`3`, `1-4`, `-4`, `5-`, or all. Raises UserMistakeError."""
    if not text:
        return range(0, 1 << 62)
    match = _STEPS.fullmatch(text)
    if match is None or (match["first"] is None and match["last"] is None):
        raise UserMistakeError(f"--steps {text}: no range of steps; write 3, 1-4 or 5-")
    first = int(match["first"] or 0)
    last = int(match["last"]) if match["last"] else 1 << 62 if match["dash"] else first
    if last < first:
        raise UserMistakeError(f"--steps {text}: ends before it begins; write {last}-{first}")
    return range(first, last + 1)
