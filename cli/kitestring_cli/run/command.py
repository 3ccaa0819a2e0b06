"""`kitestring run FILE…`: from files to a trained policy, with every part as a supervised process of this machine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
import orjson

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER, ROUTE_RUN_STATUS
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_cli.documents import Documents
from kitestring_cli.report import write_report
from kitestring_cli.run.configs import free_ports, move_to_free_ports, part_configs, write_resolved
from kitestring_cli.run.folder import RunFolder, create_run_folder, open_run_folder
from kitestring_cli.run.metrics_tail import MetricsTail
from kitestring_cli.run.resolution import LocalRun, UnresolvedError, resolve
from kitestring_cli.run.status_client import StatusClient
from kitestring_cli.run.supervisor import SAVE_SECONDS, STOP_SECONDS, Part, PartFailedError, Supervisor
from kitestring_cli.run.views import Output, View, open_view
from kitestring_cli.validate import validate

LOOK_SECONDS = 0.25
"""Between two looks at the parts."""


@click.command()
@click.argument("files", nargs=-1, type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a field, e.g. spec.steps=3.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="The same as --set spec.seed=N.")
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of runs."
)
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Go on with the run in this folder.")
@click.option(
    "--output",
    type=click.Choice(["auto", "plain", "json"]),
    default="auto",
    show_default=True,
    help="auto: live in a terminal, lines in a pipe. json: one object at the end.",
)
def run(  # noqa: PLR0917 - one parameter for each option
    files: Sequence[str], overrides: Sequence[str], seed: int | None, runs: Path, resume: Path | None, output: Output
) -> int:
    """Train on this machine from the very FILES that kubectl apply takes.

    Exit codes: 0 the run succeeded, 1 it failed, 2 something you can mend, 130 interrupted.
    """
    began = time.monotonic()
    if resume is None:
        settings = [*overrides, *([f"spec.seed={seed}"] if seed is not None else [])]
        local = local_run(files, settings)
        folder = create_run_folder(runs, local.training_run.metadata.name, datetime.now(UTC))
        write_resolved(local, folder)
        configs = part_configs(local, folder, free_ports())
        configs.write(folder.configs)
        notes = [f"not applied on this machine: {', '.join(local.not_applied)}"] if local.not_applied else []
    else:
        if files or overrides or seed is not None:
            raise UserMistakeError("--resume takes everything from the run's folder: leave out FILES, --set and --seed")
        folder, notes = open_run_folder(resume), []
        move_to_free_ports(folder)
    view = open_view(output)
    for note in (f"run {folder.name} in {folder.root}", *notes):
        view.note(note)
    try:
        return _supervised(folder, view, began, resume=resume is not None)
    finally:
        view.close()


def local_run(files: Sequence[str], overrides: Sequence[str]) -> LocalRun:
    """Load, validate and resolve the files. Raises UserMistakeError with a line for each problem."""
    if not files:
        raise UserMistakeError("no FILES given; name the YAML files of a TrainingRun and its RolloutPool")
    checked = validate(files, overrides)
    if not checked.ok:
        raise UserMistakeError("\n".join(["the files cannot be run:", *(f"  {problem}" for problem in checked.errors)]))
    training_run, pool = _the_run(checked.documents)
    try:
        return resolve(training_run, pool, checked.documents)
    except UnresolvedError as error:
        raise UserMistakeError(
            "\n".join(["not on this machine:", *(f"  {line}" for line in error.problems)])
        ) from error


def _the_run(documents: Documents) -> tuple[TrainingRun, RolloutPool]:
    if len(documents.runs) != 1:
        raise UserMistakeError(f"found {len(documents.runs)} TrainingRuns in the files; one is run at a time")
    training_run = documents.runs[0]
    name = training_run.spec.rollouts.pool_ref.name
    pool = documents.pool(name)
    if pool is None:
        raise UserMistakeError(
            f"spec.rollouts.poolRef.name: found {name}, which is in none of the files; add the file of the RolloutPool"
        )
    return training_run, pool


def _supervised(folder: RunFolder, view: View, began: float, *, resume: bool) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    folder.trainer_result.unlink(missing_ok=True)
    queue_url = _queue_url(folder)
    try:
        with Supervisor() as supervisor, StatusClient(queue_url + ROUTE_RUN_STATUS, folder) as status:
            _start(supervisor, folder, resume=resume)
            _watch(supervisor, status, MetricsTail(folder.metrics), view)
        return _finish(folder, view, began, None)
    except PartFailedError as error:
        view.note(str(error))
        code = EXIT_USER if error.exit_code == EXIT_USER else EXIT_FAILED
        _finish(folder, view, began, ("PartFailed", str(error)))
        return code
    except KeyboardInterrupt:
        view.note("interrupted: every part has been ended; go on with kitestring run --resume " + str(folder.root))
        _finish(folder, view, began, ("Interrupted", "ended by the user"))
        return EXIT_INTERRUPTED


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _queue_url(folder: RunFolder) -> str:
    queue = orjson.loads((folder.configs / "trainer.json").read_bytes())["queue"]
    return f"http://{queue['host']}:{queue['port']}"


def _start(supervisor: Supervisor, folder: RunFolder, *, resume: bool) -> None:
    """All parts at once, since each spends its first seconds with imports; workers when calls can be answered."""
    parts = ("scorer", "collector", "gateway", "policy-server")
    serving = [name for name in parts if (folder.configs / f"{name}.json").exists()]
    for name in serving:
        supervisor.start(_part(folder, name))
    supervisor.start(_part(folder, "trainer", *(["--resume"] if resume else []), restartable=False))
    for name in serving:
        supervisor.wait_until_listening(name)
    for config in sorted(folder.configs.glob("worker-*.json")):
        supervisor.start(_part(folder, config.stem, command="worker"))


def _part(folder: RunFolder, name: str, *arguments: str, command: str | None = None, restartable: bool = True) -> Part:
    config = str(folder.configs / f"{name}.json")
    seconds = SAVE_SECONDS if name == "trainer" else STOP_SECONDS
    return Part(name, (command or name, "--config", config, *arguments), folder.log(name), restartable, seconds)


def _watch(supervisor: Supervisor, status: StatusClient, metrics: MetricsTail, view: View) -> None:
    """Until the trainer has ended. Raises PartFailedError when a part is beyond help."""
    while not supervisor.ended("trainer"):
        for event in supervisor.poll():
            view.note(event)
        if (current := status.read()) is not None:
            view.status(current)
        for line in metrics.read():
            view.step(line)
        time.sleep(LOOK_SECONDS)
    for line in metrics.read():
        view.step(line)


def _finish(folder: RunFolder, view: View, began: float, failure: tuple[str, str] | None) -> int:
    """Complete the result, write the report, show both; the exit code of the run."""
    result = _result(folder, failure)
    result["wall_seconds"] = round(time.monotonic() - began, 3)
    folder.result.write_text(json.dumps(result) + "\n")
    if folder.metrics.exists():
        try:
            result["report"] = str(write_report(folder.root))
        except UserMistakeError as error:
            view.note(f"no report: {error}")
    view.result(result)
    return EXIT_OK if result["phase"] == "Succeeded" else EXIT_FAILED


def _result(folder: RunFolder, failure: tuple[str, str] | None) -> dict[str, Any]:
    """The object of `--output json`, from what the trainer left; where it left nothing, the failure is the result."""
    left: dict[str, Any] = orjson.loads(folder.trainer_result.read_bytes()) if folder.trainer_result.exists() else {}
    phase = {"Finished": "Succeeded"}.get(left.get("phase", ""), "Failed")
    reason, message = left.get("reason"), left.get("message")
    if failure is not None and phase != "Succeeded":
        reason, message = failure if not left or failure[0] == "Interrupted" else (reason, message)
    validation = left.get("validation", [])
    return {
        "run": folder.name,
        "phase": phase,
        "reason": reason,
        "message": message,
        "steps": left.get("step", 0),
        "validation_before": _validation([result for result in validation if result["step"] == 0]),
        "validation_after": _validation([result for result in validation if result["step"] > 0]),
        "rollouts": left.get("rollouts", {}),
        "excluded": left.get("excluded", 0),
        "superseded": left.get("superseded", 0),
        "skipped_steps": left.get("skipped_steps", 0),
        "tokens": left.get("tokens", 0),
        "checkpoint": left.get("checkpoint"),
    }


def _validation(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Figures by mode (greedy, sampled) of the last validated step among the results."""
    last = max((result["step"] for result in results), default=0)
    return {
        result["mode"].removeprefix("validation-"): {
            "step": last,
            "reward": result["reward"],
            "tool_use": result["tool_use"],
            "scored": result["scored"],
            "rollouts": result["rollouts"],
        }
        for result in results
        if result["step"] == last
    }
