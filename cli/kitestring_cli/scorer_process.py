"""A scorer container of the user's as a process of this machine: its command, with a free port, watched while it runs.

It ends with whoever started it, and so does all that it started. When it ends by itself, so do we, and the supervisor
starts both again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_FAILED, EXIT_OK
from kitestring_api.v1alpha1.reward import PORT_VARIABLE
from kitestring_cli.descendants import become_subreaper, kill_descendants

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LOOK_SECONDS = 0.05
STOP_SECONDS = 3.0
"""How long it may take to end after SIGTERM; the supervisor waits a little longer for us."""
_KEPT = ("PATH", "HOME", "TMPDIR")


class ScorerConfig(BaseModel):
    """`kitestring scorer --config scorer.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = Field(min_length=1)
    env: Mapping[str, str] = Field(default_factory=dict)
    env_files: Mapping[str, Path] = Field(default_factory=dict, description="variables whose values are secrets")
    working_dir: Path
    port: int = Field(ge=1, le=65535, description="stands in the variable PORT")


async def serve(config: ScorerConfig, announce: Callable[[Mapping[str, str]], None]) -> int:
    """Run the scorer until it ends or we are told to; the exit code. Raises UserMistakeError when it cannot start."""
    become_subreaper()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    process = await _start(config)
    ended = asyncio.create_task(process.wait())
    asked = asyncio.create_task(stop.wait())
    listening = asyncio.create_task(_listens(config.port))
    try:
        await asyncio.wait((ended, asked, listening), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            announce({"scorer": f"http://{HOST}:{config.port}"})
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await _stop(process.pid, ended)
            return EXIT_OK
        log.error("the scorer ended by itself with %s; it is to serve until it is told to end", _how(ended.result()))
        return EXIT_FAILED
    finally:
        for task in (asked, listening):
            task.cancel()
        kill_descendants()


async def _start(config: ScorerConfig) -> asyncio.subprocess.Process:
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"LANG": "C.UTF-8"}
    environment |= {**config.env, **{name: path.read_text() for name, path in config.env_files.items()}}
    log.info("the scorer is to listen on %s:%d (%s)", HOST, config.port, PORT_VARIABLE)
    try:
        return await asyncio.create_subprocess_exec(
            *config.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,  # both go into our log: our own output is for the listening line
            env=environment | {PORT_VARIABLE: str(config.port)},
            cwd=config.working_dir,
            start_new_session=True,
        )
    except OSError as error:
        raise UserMistakeError(f"the scorer {config.command[0]} cannot be started: {error.strerror}") from error


async def _listens(port: int) -> None:
    """Return when the port accepts a connection."""
    while True:
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except OSError:
            await asyncio.sleep(LOOK_SECONDS)
        else:
            writer.close()
            return


async def _stop(group: int, ended: asyncio.Task[int]) -> None:
    _tell(group, signal.SIGTERM)
    _, late = await asyncio.wait((ended,), timeout=STOP_SECONDS)
    if late:
        log.warning("the scorer did not end within %.0f s: killed", STOP_SECONDS)
        _tell(group, signal.SIGKILL)
        await ended


def _tell(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself, of which is heard a moment later
        os.killpg(group, number)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
