"""`kitestring inspect RUN`."""

from __future__ import annotations

import json
from pathlib import Path

import click
import orjson
from rich.console import Console

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_OK, ROUTE_RUN_STATUS
from kitestring_cli.inspection.advice import advise
from kitestring_cli.inspection.finding import find_run, run_argument
from kitestring_cli.inspection.records import RunRecords
from kitestring_cli.inspection.summary import summarise
from kitestring_cli.inspection.view import show_summary
from kitestring_cli.run.folder import RunFolder
from kitestring_cli.run.status_client import StatusClient


@click.command("inspect")
@run_argument
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def inspect_run(run: str, runs: Path, output: str) -> int:
    """Say how a run went: validation, rewards, failures, agreement, costs, and what to look at next.

    RUN is the folder of a run, its name below --runs, the name of a TrainingRun (its newest run), or `latest`.
    """
    folder = find_run(run, runs)
    records = RunRecords(folder)
    summary = summarise(records, _phase_now(folder))
    if output == "json":
        data = summary.as_json()
        data["next"] = [{"text": advice.text, "command": advice.command} for advice in advise(summary)]
        click.echo(json.dumps(data))
    else:
        show_summary(Console(highlight=False), summary, records.figures.lines)
    return EXIT_OK


def _phase_now(folder: RunFolder) -> str | None:
    """What the trainer of the run says; None when no trainer of it answers."""
    if not (folder.secrets / "queue").is_file():
        return None
    path = folder.configs / "trainer.json"
    try:
        queue = orjson.loads(path.read_bytes())["queue"]
    except (OSError, orjson.JSONDecodeError, KeyError) as error:
        raise UserMistakeError(f"{path}: cannot be read: {error}") from error
    with StatusClient(f"http://{queue['host']}:{queue['port']}{ROUTE_RUN_STATUS}", folder) as client:
        status = client.read()
    return None if status is None or status.run != folder.name else status.phase
