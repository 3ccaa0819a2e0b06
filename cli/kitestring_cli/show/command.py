"""`kitestring show RUN ROLLOUT`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from kitestring_api.names import EXIT_OK
from kitestring_cli.inspection.attempts import require_traces
from kitestring_cli.inspection.finding import find_run, run_argument
from kitestring_cli.inspection.records import RunRecords
from kitestring_cli.show.finding import choose_attempt, find_rollout
from kitestring_cli.show.story import rollout_story, story_json
from kitestring_cli.show.view import show_rollout


@click.command()
@run_argument
@click.argument("rollout")
@click.option("--attempt", metavar="A", help="Another attempt than the one that counts: 1, 2, … or part of its id.")
@click.option("--ids", is_flag=True, help="Token ids and log-probabilities too.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def show(  # noqa: PLR0917 - one parameter for each option
    run: str, runs: Path, rollout: str, attempt: str | None, ids: bool, output: str
) -> int:
    """Print a rollout: the conversation call by call, with its reward and what became of it in training.

    RUN is a run as for `kitestring inspect`, ROLLOUT the id of a rollout or any part that only one has.
    """
    records = RunRecords(find_run(run, runs))
    planned = find_rollout(records, rollout)
    require_traces(records)
    story = rollout_story(records, planned)
    chosen = [story.main] if story.main is not None else []
    if attempt is not None:
        name = choose_attempt([known.attempt for known in story.attempts], attempt)
        chosen = [known for known in story.attempts if known.attempt == name]
    if output == "json":
        attempts = story.attempts if attempt is None else chosen
        click.echo(json.dumps(story_json(story, attempts, ids=ids)))
    else:
        show_rollout(Console(highlight=False), story, chosen, ids=ids)
    return EXIT_OK
