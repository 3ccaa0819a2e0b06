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
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp

from kitestring_api import names
from kitestring_rollout.worker.config import Listener, WorkerConfig
from kitestring_rollout.worker.delivery import base_environment, pod_plan
from kitestring_rollout.worker.health import served
from kitestring_rollout.worker.launcher_process import LauncherProcess, launcher_command
from kitestring_rollout.worker.launcher_socket import LauncherSocket
from kitestring_rollout.worker.program import NotAPython, PythonProgram, python_program
from kitestring_rollout.worker.queue_client import QueueClient, QueueRefused
from kitestring_rollout.worker.running_agent import CannotLaunch, Launcher
from kitestring_rollout.worker.worker import Unfit, Worker

log = logging.getLogger(__name__)


class WorkerMistake(Exception):
    """The user's mistake: one line that names it and the remedy."""


async def work(
    config: WorkerConfig, listening: Callable[[dict[str, str]], None], stop: asyncio.Event | None = None
) -> None:
    """Works until the run has ended or `stop` is set. WorkerMistake, Unfit.

    Calls `listening` with its URLs, by name, when it begins to lease.
    """
    credential = _read(config.queue_credential_file, "queue_credential_file").strip()
    secrets = {name: _read(path, f"agent.env_files.{name}") for name, path in config.agent.env_files.items()}
    base = base_environment(config, os.environ.get("PATH", os.defpath), secrets)
    program, broken = _program(config)
    stopping = stop or asyncio.Event()
    async with AsyncExitStack() as stack:
        launcher: Launcher
        if config.launcher_socket is None:
            scratch_root = stack.enter_context(_scratch(config.scratch_root))
            folder = config.agent.working_dir or scratch_root
            command = launcher_command(program, tuple(config.agent_protocol.preload), base, folder)
            launcher = LauncherProcess(command, config.ready_seconds, broken)
        else:
            # Of the agents' folders itself no agent is the owner, as it would be of one in between: it could bar it.
            scratch_root = config.scratch_root
            launcher = LauncherSocket(
                config.launcher_socket,
                pod_plan(config, base, program, scratch_root),
                uid=config.launcher_uid,
                ready_seconds=config.ready_seconds,
                stopping=stopping,
                broken=broken,
            )
            _open(launcher, config.launcher_socket)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        queue = QueueClient(session, config.queue_url, credential)
        worker = Worker(config, queue, launcher, base=base, scratch_root=scratch_root, program=program)
        urls = {}
        if config.health is not None:
            urls["health"] = await _serve_health(stack, config.health, worker, launcher)
        forwarding = asyncio.create_task(_forward(stopping, worker))
        listening(urls)
        try:
            await worker.run()
        except QueueRefused as error:
            raise WorkerMistake(str(error)) from error
        finally:
            forwarding.cancel()


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
    except Unfit as error:
        print(f"worker: {error}", file=sys.stderr)  # noqa: T201 (the same)
        return names.EXIT_FAILED
    return names.EXIT_OK


async def _run(config: WorkerConfig) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await work(config, lambda urls: print(json.dumps({"listening": urls}), flush=True), stop)  # noqa: T201 (the protocol)


async def _forward(stop: asyncio.Event, worker: Worker) -> None:
    await stop.wait()
    worker.stop()


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkerMistake(f"{field}: cannot read {path}: {error}") from None


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    """A folder of this process alone below the root: workers may share the root, agents of several may not collide."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="worker-", dir=root.resolve()))
    except OSError as error:
        raise WorkerMistake(f"scratch_root: cannot make a folder below {root}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open(launcher: LauncherSocket, path: Path) -> None:
    try:
        launcher.open()
    except OSError as error:
        raise WorkerMistake(f"launcher_socket: cannot listen at {path}: {error.strerror or error}") from None


async def _serve_health(stack: AsyncExitStack, listener: Listener, worker: Worker, launcher: Launcher) -> str:
    def state() -> dict[str, bool]:
        return {"launcher": launcher.present, "queue": worker.reaches_queue}

    try:
        return await stack.enter_async_context(served(listener, state))
    except OSError as error:
        raise WorkerMistake(f"health: cannot bind {listener.host}:{listener.port}: {error.strerror}") from None


def _program(config: WorkerConfig) -> tuple[PythonProgram | None, CannotLaunch | None]:
    if not config.agent_protocol.preload:
        return None, None
    try:
        return python_program((*config.agent.command, *config.agent.args)), None
    except NotAPython as error:
        return None, CannotLaunch(str(error))
