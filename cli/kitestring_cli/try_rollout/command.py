"""`kitestring try FILE…`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from rich.console import Console

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import ENV_LOG_LEVEL, ENV_OPENAI_API_KEY, EXIT_FAILED, EXIT_OK, EXIT_USER
from kitestring_cli.documents import load
from kitestring_cli.run.command import local_run
from kitestring_cli.run.configs import PartConfigs, free_ports, part_configs
from kitestring_cli.run.folder import RunFolder
from kitestring_cli.run.resolution import LocalRun
from kitestring_cli.run.supervisor import Part, PartFailedError, Supervisor
from kitestring_cli.try_rollout.endpoint import Endpoint, find_endpoint, overrides_for
from kitestring_cli.try_rollout.findings import limits_used, rows_of, warnings
from kitestring_cli.try_rollout.stage import Played, play
from kitestring_cli.try_rollout.view import (
    Outcome,
    outcome_json,
    scorer_text,
    show_new_call,
    show_outcome,
    show_start,
)
from kitestring_rollout.gateway.config import FrozenModel, TrainedPolicy
from kitestring_rollout.traces.records import CallRecord
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.tasks import TaskSet, load_tasks

POLICY_SERVER = "policy-server"
SCORER = "scorer"


@click.command("try")
@click.argument("files", nargs=-1, type=click.Path())
@click.option("--task", "row", type=click.IntRange(min=0), default=0, show_default=True, help="Row of the task file.")
@click.option("--endpoint", metavar="URL", help="An OpenAI-compatible endpoint in place of the policy; its key, where"
              " it needs one, from OPENAI_API_KEY.")  # fmt: skip
@click.option("--model", metavar="NAME", help="Model of the endpoint, where it serves several.")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a field, e.g. spec.seed=3.")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def try_rollout(  # noqa: PLR0917 - one parameter for each option
    files: Sequence[str], row: int, endpoint: str | None, model: str | None, overrides: Sequence[str], output: str
) -> int:
    """Run one rollout of the agent in FILES, without a trainer, and say what came of it.

    The agent works on one task, against the policy or any OpenAI-compatible endpoint, through the same parts as in a
    run: what it says, its reward, and how it would be trained on.

    Exit codes: 0 the agent ended well and was rewarded, 1 it did not, 2 something you can mend.
    """
    if model is not None and endpoint is None:
        raise UserMistakeError("--model names a model of --endpoint, which is not given")
    logging.basicConfig(stream=sys.stderr, level=os.environ.get(ENV_LOG_LEVEL, "CRITICAL").upper())
    found = find_endpoint(endpoint, model, os.environ.get(ENV_OPENAI_API_KEY)) if endpoint is not None else None
    documents = [(document.kind, document.raw) for document in load(files, overrides).documents]
    local = local_run(files, [*overrides, *overrides_for(documents, found)])
    console = Console(highlight=False, quiet=output == "json")
    with tempfile.TemporaryDirectory(prefix="kitestring-try-") as scratch:
        folder = _folder(Path(scratch))
        configs = _configs(local, folder, found)
        tasks = _tasks(configs.trainer, row)
        show_start(console, row, tasks.task(row), _model_text(local, found))
        signal.signal(signal.SIGTERM, _interrupt)
        with Supervisor() as supervisor:
            configs.write(folder.configs)
            if configs.policy_server is not None:
                _serve(supervisor, folder, POLICY_SERVER, console)
            if configs.scorer is not None:
                _serve(supervisor, folder, SCORER, console)
            played = _play(configs, row, tasks, lambda call, earlier: show_new_call(console, call, earlier))
    outcome = _outcome(configs, row, tasks, played, local, reports_ids=found is None or found.reports_ids)
    if output == "json":
        click.echo(json.dumps(outcome_json(outcome)))
    else:
        show_outcome(console, outcome)
    return EXIT_OK if outcome.good else EXIT_FAILED


def _folder(root: Path) -> RunFolder:
    folder = RunFolder(root)
    for path in (folder.configs, folder.resolved, folder.logs, folder.store, folder.weights, folder.scratch):
        path.mkdir()
    folder.secrets.mkdir(mode=0o700)
    return folder


def _configs(local: LocalRun, folder: RunFolder, endpoint: Endpoint | None) -> PartConfigs:
    """Those of a run; an endpoint that reports token ids is called as a policy server is, with its key otherwise."""
    configs = part_configs(local, folder, free_ports())
    if endpoint is None:
        return configs
    gateway, name = configs.gateway, local.policy.name
    others = tuple(model for model in gateway.frozen if model.name != name)
    aliases = tuple(local.policy.aliases)
    if endpoint.reports_ids:
        server = endpoint.url.removesuffix("/v1")
        policy = TrainedPolicy(name=name, servers=(server,), served_name=endpoint.model, aliases=aliases)
        return replace(configs, gateway=gateway.model_copy(update={"policies": (policy,), "frozen": others}))
    key = folder.secret("endpoint", endpoint.api_key) if endpoint.api_key else None
    served = FrozenModel(name=name, url=endpoint.url, model=endpoint.model, api_key_file=key, aliases=aliases)
    return replace(configs, gateway=gateway.model_copy(update={"frozen": (served, *others)}))


def _tasks(config: TrainerConfig, row: int) -> TaskSet:
    """The rows up to the one that is tried. Raises UserMistakeError when there is none, or it cannot be used."""
    source = config.spec.tasks.train
    tasks = load_tasks(
        config.train_tasks or source.inline or (), config.task_fields, format=source.format, limit=row + 1
    )
    if row >= len(tasks):
        raise UserMistakeError(f"--task {row}: {tasks.source} has rows 0 to {len(tasks) - 1}")
    problem = tasks.problem(row)
    if problem is not None:
        raise UserMistakeError(f"--task {row}: {tasks.source}: the row {problem}")
    return tasks


def _model_text(local: LocalRun, endpoint: Endpoint | None) -> str:
    if endpoint is None:
        return f"policy {local.policy.name}, {local.model or 'served by its endpoint'}"
    return f"{endpoint.model} at {endpoint.url}, as {local.policy.name}"


def _serve(supervisor: Supervisor, folder: RunFolder, part: str, console: Console) -> None:
    """Start the part, as a process of its own, and wait for it. Raises UserMistakeError."""
    arguments = (part, "--config", str(folder.configs / f"{part}.json"))
    supervisor.start(Part(part, arguments, folder.log(part), restartable=False))
    with _waiting(console, f"starting the {part.replace('-', ' ')}"):
        try:
            supervisor.wait_until_listening(part)
        except PartFailedError as error:
            if error.exit_code == EXIT_USER:
                raise UserMistakeError(str(error)) from error
            raise click.ClickException(str(error)) from error


@contextmanager
def _waiting(console: Console, what: str) -> Iterator[None]:
    if not console.is_terminal:
        yield
        return
    with console.status(f"{what} …"):
        yield


def _play(
    configs: PartConfigs, row: int, tasks: TaskSet, said: Callable[[CallRecord, Sequence[CallRecord]], None]
) -> Played:
    """The rollout in an event loop of its own; Ctrl-C and SIGTERM end the agent and everything else first."""

    async def interruptible() -> Played:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        return await play(configs, row, tasks, said)

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _outcome(
    configs: PartConfigs, row: int, tasks: TaskSet, played: Played, local: LocalRun, *, reports_ids: bool
) -> Outcome:
    spec, pool, task = configs.trainer.spec, configs.trainer.pool, tasks.task(row)
    end = played.attempt.end if played.attempt is not None else None
    asked = (local.policy.name, *local.policy.aliases, *(model.name for model in local.frozen))
    return Outcome(
        row=row,
        task=task,
        played=played,
        rows=rows_of(played.calls, spec),
        limits=limits_used(played.calls, end, pool),
        warnings=warnings(played.calls, end, spec, reports_ids=reports_ids, asked=tuple(dict.fromkeys(asked))),
        scorer=scorer_text(pool, task, played),
    )
