"""A launcher of the worker's own: a process that is started, and started again when it dies."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitestring_rollout.launcher import launcher
from kitestring_rollout.launcher.launcher import AgentStart, Plan
from kitestring_rollout.worker import control
from kitestring_rollout.worker.program import PythonProgram
from kitestring_rollout.worker.running_agent import (
    CannotLaunch,
    LauncherLost,
    RunningAgent,
    hand_over,
    import_failed,
    import_took_too_long,
)

log = logging.getLogger(__name__)

RESTARTS = 5
RESTART_SECONDS = 0.2
"""First pause between restarts; doubles."""


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """How the launcher is started: the agent's interpreter and modules, or our own interpreter and none."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    plan: Plan


def launcher_command(
    program: PythonProgram | None, preload: tuple[str, ...], env: Mapping[str, str], cwd: Path
) -> LauncherCommand:
    """With a program it is forked in the agent's own interpreter; without, agents are executed from a bare one."""
    file = launcher.__file__
    if program is None:
        return LauncherCommand((sys.executable, "-I", "-S", file), env, cwd, Plan([], None))
    argv = (program.interpreter, *program.options, file)
    return LauncherCommand(argv, env, cwd, Plan(list(preload), [program.kind, program.target]))


class LauncherProcess:
    """Starts agents. One launcher process serves all of a worker; a new one is started when it died."""

    def __init__(self, command: LauncherCommand, ready_seconds: float, broken: CannotLaunch | None = None) -> None:
        """`broken` says beforehand why no agent can be started."""
        self._command = command
        self._ready_seconds = ready_seconds
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._broken = broken

    @property
    def present(self) -> bool:
        return self._control is not None

    async def ready(self) -> None:
        """Starts the launcher where none was started yet; one that died is started again for the next agent."""
        async with self._lock:
            if self._process is None:
                await self._ensure()

    async def start(self, agent: AgentStart) -> RunningAgent:
        return await hand_over(agent, self._give, self)

    async def close(self, done: bool = False) -> None:
        async with self._lock:
            await self._end()

    async def _give(self, fd: int) -> None:
        async with self._lock:
            try:
                await control.give(await self._ensure(), b"start", fd)
            except OSError:  # it died since, which shows here before its exit does
                await self._end()
                await control.give(await self._ensure(), b"start", fd)

    async def kill_guardian(self, pid: int) -> None:
        async with self._lock:
            if self._control is not None:
                await control.tell(self._control, {"kill": pid})

    async def lives_on(self) -> bool:
        """Guardians here outlive their launcher: it is never the cause."""
        return True

    async def was_killed(self) -> bool:
        """It ended nothing."""
        return False

    async def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            await self._process.wait()

    async def _ensure(self) -> socket.socket:
        if self._broken is not None:
            raise self._broken
        if self._control is not None and self._process is not None and self._process.returncode is None:
            return self._control
        for tries in range(RESTARTS):
            if self._process is not None:
                await self._end()
                log.warning("the launcher ended with %s; starting another", self._process.returncode)
                await asyncio.sleep(RESTART_SECONDS * 2**tries)
            try:
                self._control = await self._start()
            except CannotLaunch as error:
                self._broken = error
                raise
            except LauncherLost:
                continue
            return self._control
        raise LauncherLost(f"the launcher died {RESTARTS} times before it was ready; the worker's log says more")

    async def _start(self) -> socket.socket:
        command = self._command
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=theirs.fileno(),
                stdout=2,  # what modules print while they are imported belongs into our log
                env=dict(command.env),
                cwd=command.cwd,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise CannotLaunch(_not_started(command, error)) from error
        finally:
            theirs.close()
        begun = time.monotonic()
        answer = await self._handshake(ours)
        if "failed" in answer:
            ours.close()
            raise import_failed(command.argv[0], command.plan.preload, answer["failed"])
        for note in answer["notes"]:
            log.warning("%s", note)
        log.info("launcher ready: Python %s, %.2f s", answer["ready"], time.monotonic() - begun)
        return ours

    async def _handshake(self, ours: socket.socket) -> dict[str, Any]:
        try:
            await control.tell(ours, self._command.plan._asdict())
            async with asyncio.timeout(self._ready_seconds):
                answer = await control.hear(ours)
        except BrokenPipeError:
            answer = None
        except TimeoutError:
            ours.close()
            raise import_took_too_long(self._command.plan.preload, self._ready_seconds) from None
        if answer is None:
            ours.close()
            raise LauncherLost("the launcher ended before it was ready")
        return answer


def _not_started(command: LauncherCommand, error: OSError) -> str:
    if not command.cwd.is_dir():
        return f"working folder {command.cwd}: {error.strerror}"
    return (
        f"agentProtocol.preload: {command.argv[0]}: {error.strerror} (PATH={command.env.get('PATH', '')}); "
        "correct the first word of `command`"
    )
