"""The parts of a run as commands: read the config file, watch the parent, serve."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TypeVar

import click
from pydantic import BaseModel, ValidationError

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import ENV_LOG_LEVEL
from kitestring_cli.parent_watch import watch_parent

Config = TypeVar("Config", bound=BaseModel)

config_option = click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(path_type=Path),
    help="JSON file; its fields are in docs/.",
)


@click.command()
@config_option
def collector(config_file: Path) -> None:
    """Take traces over OTLP/HTTP; answer when they are durable."""
    from kitestring_rollout.collector.config import CollectorConfig  # noqa: PLC0415
    from kitestring_rollout.collector.server import serve  # noqa: PLC0415

    begin()
    run_loop(serve(read_config(config_file, CollectorConfig)))


@click.command()
@config_option
def gateway(config_file: Path) -> int:
    """Stand between agents and models: record calls, hold limits."""
    from kitestring_rollout.gateway.app import serve  # noqa: PLC0415
    from kitestring_rollout.gateway.config import GatewayConfig  # noqa: PLC0415

    begin()
    return run_loop(serve(read_config(config_file, GatewayConfig)))


@click.command("policy-server")
@config_option
def policy_server(config_file: Path) -> None:
    """Serve a policy on CPU behind the subset of vLLM's routes that a run needs."""
    from kitestring_trainer.policy_server import PolicyServerConfig, PolicyServerError, run  # noqa: PLC0415

    begin()
    try:
        run(read_config(config_file, PolicyServerConfig))
    except PolicyServerError as error:
        raise UserMistakeError(str(error)) from error


@click.command("policy-sidecar")
@config_option
def policy_sidecar(config_file: Path) -> None:
    """Stand before a policy server in its pod: pass inference on, keep its weights current."""
    from kitestring_rollout.policy_sidecar.config import PolicySidecarConfig  # noqa: PLC0415
    from kitestring_rollout.policy_sidecar.process import serve  # noqa: PLC0415

    begin()
    run_loop(serve(read_config(config_file, PolicySidecarConfig)))


@click.command()
@config_option
def worker(config_file: Path) -> int:
    """Lease rollouts from the queue and run the agent for each."""
    from kitestring_rollout.worker.config import WorkerConfig  # noqa: PLC0415
    from kitestring_rollout.worker.main import run  # noqa: PLC0415

    begin()
    return run(read_config(config_file, WorkerConfig))


@click.command()
@config_option
def scorer(config_file: Path) -> int:
    """Run the command of a scorer container beside a local run."""
    from kitestring_cli.scorer_process import ScorerConfig, serve  # noqa: PLC0415

    begin()
    return run_loop(serve(read_config(config_file, ScorerConfig), announce))


@click.command()
@config_option
def fetch(config_file: Path) -> int:
    """Bring models and task files from object storage and the Hugging Face hub into folders."""
    from kitestring_rollout.fetch.command import run  # noqa: PLC0415
    from kitestring_rollout.fetch.config import FetchConfig  # noqa: PLC0415

    begin()
    return run(read_config(config_file, FetchConfig))


@click.command()
@config_option
@click.option("--resume", is_flag=True, help="Go on from the last resumable checkpoint of this run.")
def trainer(config_file: Path, resume: bool) -> int:
    """Own the rollout queue and train."""
    from kitestring_trainer.driver import main  # noqa: PLC0415

    begin()
    return main(config_file, resume=resume, announce=announce)


def begin() -> None:
    """What every part does first: end with the parent, log to standard error."""
    watch_parent()
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get(ENV_LOG_LEVEL, "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def announce(listening: Mapping[str, str]) -> None:
    """Say on standard output that the part serves, and where."""
    click.echo(json.dumps({"listening": dict(listening)}))
    sys.stdout.flush()


def read_config(path: Path, model: type[Config]) -> Config:
    """Raises UserMistakeError naming file and field."""
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserMistakeError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserMistakeError(f"{path}: {where}: {first['msg']}; found {first['input']!r}") from error


Result = TypeVar("Result")


def run_loop(main: Coroutine[None, None, Result]) -> Result:
    """Run on uvloop: the gateway's bound needs it, the collector profits."""
    import uvloop  # noqa: PLC0415

    return uvloop.run(main)
