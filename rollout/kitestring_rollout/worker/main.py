"""The worker as a process: files, signals, exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import aiohttp

from kitestring_api import names
from kitestring_rollout.worker.config import WorkerConfig
from kitestring_rollout.worker.delivery import base_environment
from kitestring_rollout.worker.launcher_process import CannotLaunch, Launcher, launcher_command
from kitestring_rollout.worker.program import NotAPython, PythonProgram, python_program
from kitestring_rollout.worker.queue_client import QueueClient, QueueRefused
from kitestring_rollout.worker.worker import Worker

log = logging.getLogger(__name__)


class WorkerMistake(Exception):
    """The user's mistake: one line that names it and the remedy."""


async def work(config: WorkerConfig, listening: Callable[[], None], stop: asyncio.Event | None = None) -> None:
    """Works until the run has ended or `stop` is set; calls `listening` when it begins to lease. WorkerMistake."""
    credential = _read(config.queue_credential_file, "queue_credential_file").strip()
    secrets = {name: _read(path, f"agent.env_files.{name}") for name, path in config.agent.env_files.items()}
    base = base_environment(config, os.environ.get("PATH", os.defpath), secrets)
    program, broken = _program(config)
    scratch_root = _scratch(config.scratch_root)
    command = launcher_command(
        program, tuple(config.agent_protocol.preload), base, config.agent.working_dir or scratch_root
    )
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            queue = QueueClient(session, config.queue_url, credential)
            launcher = Launcher(command, config.ready_seconds, broken)
            worker = Worker(config, queue, launcher, base=base, scratch_root=scratch_root, program=program)
            stopping = asyncio.create_task(_forward(stop or asyncio.Event(), worker))
            listening()
            try:
                await worker.run()
            finally:
                stopping.cancel()
    except QueueRefused as error:
        raise WorkerMistake(str(error)) from error
    finally:
        shutil.rmtree(scratch_root, ignore_errors=True)


def run(config: WorkerConfig) -> int:
    """Runs a worker in this process to its end; returns the exit code."""
    logging.basicConfig(
        level=os.environ.get(names.ENV_LOG_LEVEL, "WARNING").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        asyncio.run(_run(config))
    except WorkerMistake as mistake:
        print(f"worker: {mistake}", file=sys.stderr)  # noqa: T201 (the one line a user reads)
        return names.EXIT_USER
    return names.EXIT_OK


async def _run(config: WorkerConfig) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await work(config, lambda: print(json.dumps({"listening": {}}), flush=True), stop)  # noqa: T201 (the protocol)


async def _forward(stop: asyncio.Event, worker: Worker) -> None:
    await stop.wait()
    worker.stop()


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkerMistake(f"{field}: cannot read {path}: {error}") from None


def _scratch(root: Path) -> Path:
    """A folder of this process alone below the root: workers may share the root, agents of several may not collide."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="worker-", dir=root.resolve()))
    except OSError as error:
        raise WorkerMistake(f"scratch_root: cannot make a folder below {root}: {error.strerror}") from None


def _program(config: WorkerConfig) -> tuple[PythonProgram | None, CannotLaunch | None]:
    if not config.agent_protocol.preload:
        return None, None
    try:
        return python_program((*config.agent.command, *config.agent.args)), None
    except NotAPython as error:
        return None, CannotLaunch(str(error))
