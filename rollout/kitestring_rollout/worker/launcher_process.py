"""The launcher as the worker sees it: a process that is started, restarted when it dies, and asked for agents."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitestring_rollout.launcher import launcher
from kitestring_rollout.launcher.launcher import AgentEnd, AgentStart, Plan
from kitestring_rollout.worker.program import PythonProgram

log = logging.getLogger(__name__)

RESTARTS = 5
RESTART_SECONDS = 0.2
"""First pause between restarts; doubles."""
START_SECONDS = 60.0
"""A guardian that has not said within this time that its agent runs is given up."""


class CannotLaunch(Exception):
    """No agent of this worker can be started: the user's mistake, the text says what to mend. It will not go away."""


class LauncherLost(Exception):
    """The launcher, or the guardian of an agent, died."""


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


class RunningAgent:
    """One agent: `started` and `ended` are futures; `cancel` gives it the grace, `kill` none."""

    def __init__(self, owner: Launcher, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[float] = loop.create_future()
        """Monotonic time at which the program began."""
        self._owner = owner
        self._reader = reader
        self._writer = writer
        self._guardian: int | None = None

    async def ended(self) -> AgentEnd:
        """Waits until no process of the agent is left; LauncherLost when its guardian died without a word."""
        try:
            while True:
                message = await self._next()
                if message["event"] == "started":
                    self._guardian = message["guardian"]
                    self.started.set_result(message["monotonic"])
                else:
                    del message["event"]
                    return AgentEnd(**message)
        finally:
            self.started.cancel()
            self._writer.close()

    async def _next(self) -> dict[str, Any]:
        try:
            size = struct.unpack("!I", await self._reader.readexactly(4))[0]
            message: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise LauncherLost("the process that guards the agent died") from error
        return message

    def cancel(self) -> None:
        self._send({"do": "cancel"})

    def kill(self) -> None:
        self._send({"do": "kill"})

    async def abandon(self) -> None:
        """For a guardian that does not answer: it is killed, and the launcher kills what it had."""
        if self._guardian is not None:
            await self._owner.kill_guardian(self._guardian)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._writer.write(struct.pack("!I", len(data)) + data)


class Launcher:
    """Starts agents. One launcher process serves all of a worker; a new one is started when it died."""

    def __init__(self, command: LauncherCommand, ready_seconds: float, broken: CannotLaunch | None = None) -> None:
        """`broken` says beforehand why no agent can be started."""
        self._command = command
        self._ready_seconds = ready_seconds
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._broken = broken

    async def ready(self) -> None:
        """Starts the launcher where none runs. CannotLaunch: never will; LauncherLost: it died again and again."""
        async with self._lock:
            await self._ensure()

    async def start(self, agent: AgentStart) -> RunningAgent:
        """Hands an agent to a guardian of its own; raises as `ready` does."""
        ours, theirs = socket.socketpair()
        try:
            async with self._lock:
                try:
                    await _send_with_fd(await self._ensure(), b"start", theirs.fileno())
                except OSError:  # it died since, which shows here before its exit does
                    await self._end()
                    await _send_with_fd(await self._ensure(), b"start", theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        data = json.dumps(agent._asdict()).encode()
        writer.write(struct.pack("!I", len(data)) + data)
        return RunningAgent(self, reader, writer)

    async def kill_guardian(self, pid: int) -> None:
        async with self._lock:
            if self._control is not None:
                await asyncio.get_running_loop().sock_sendall(self._control, json.dumps({"kill": pid}).encode())

    async def close(self) -> None:
        """Ends the launcher and whatever still runs below it."""
        async with self._lock:
            await self._end()

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
            raise CannotLaunch(
                f"agentProtocol.preload: {command.argv[0]} cannot import {', '.join(command.plan.preload)}: "
                f"{answer['failed']}; install it for that interpreter, or remove it from preload"
            )
        for note in answer["notes"]:
            log.warning("%s", note)
        log.info("launcher ready: Python %s, %.2f s", answer["ready"], time.monotonic() - begun)
        return ours

    async def _handshake(self, control: socket.socket) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(control, json.dumps(self._command.plan._asdict()).encode())
            async with asyncio.timeout(self._ready_seconds):
                answer = await loop.sock_recv(control, 1 << 20)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        except TimeoutError:
            control.close()
            raise CannotLaunch(
                f"agentProtocol.preload: importing {', '.join(self._command.plan.preload)} took longer than "
                f"{self._ready_seconds:.0f} s; preload fewer modules"
            ) from None
        if not answer:
            control.close()
            raise LauncherLost("the launcher ended before it was ready")
        message: dict[str, Any] = json.loads(answer)
        return message


def _not_started(command: LauncherCommand, error: OSError) -> str:
    if not command.cwd.is_dir():
        return f"working folder {command.cwd}: {error.strerror}"
    return (
        f"agentProtocol.preload: {command.argv[0]}: {error.strerror} (PATH={command.env.get('PATH', '')}); "
        "correct the first word of `command`"
    )


async def _send_with_fd(control: socket.socket, data: bytes, fd: int) -> None:
    while True:
        try:
            socket.send_fds(control, [data], [fd])
        except BlockingIOError:
            await asyncio.sleep(0.001)  # the launcher is behind: its queue of messages is full
        else:
            return
