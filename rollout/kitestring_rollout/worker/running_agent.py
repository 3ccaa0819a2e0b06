"""One agent as the worker sees it, whatever launcher started it, and what a launcher is."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import TypeAdapter

from kitestring_rollout.launcher.launcher import AgentEnd, AgentStart

START_SECONDS = 60.0
"""A guardian that has not said within this time that its agent runs is given up."""


NONSENSE = "the process that guards the agent said what makes no sense"


class _Started(NamedTuple):
    monotonic: float
    guardian: int


_STARTED: TypeAdapter[_Started | AgentEnd] = TypeAdapter(_Started)
_ENDED: TypeAdapter[_Started | AgentEnd] = TypeAdapter(AgentEnd)


class CannotLaunch(Exception):
    """No agent of this worker can be started: the user's mistake, the text says what to mend. It will not go away."""


class LauncherLost(Exception):
    """The launcher, or the guardian of an agent, died."""


def import_failed(interpreter: str, preload: Sequence[str], reason: str) -> CannotLaunch:
    return CannotLaunch(
        f"agentProtocol.preload: {interpreter} cannot import {', '.join(preload)}: {reason}; "
        "install it for that interpreter, or remove it from preload"
    )


def import_took_too_long(preload: Sequence[str], seconds: float) -> CannotLaunch:
    return CannotLaunch(
        f"agentProtocol.preload: importing {', '.join(preload)} took longer than {seconds:.0f} s; preload fewer modules"
    )


class Launcher(Protocol):
    """What starts agents."""

    @property
    def present(self) -> bool:
        """Whether agents can be started now, as far as known."""

    async def ready(self) -> None:
        """Waits until agents can be started. CannotLaunch: never will; LauncherLost: it died again and again."""

    async def start(self, agent: AgentStart) -> RunningAgent:
        """Hands an agent to a guardian of its own; raises as `ready` does."""

    async def close(self, done: bool = False) -> None:
        """Ends the launcher and whatever still runs below it. `done`: nothing will be left to do for another."""


LONGEST = 1 << 28
"""Bytes of a message of a guardian: of the most that it may hold (`output.maxBytes` of JSON) and a good deal more."""


class RunningAgent:
    """One agent: `started` and `ended` are futures; `cancel` gives it the grace, `kill` none."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kill_guardian: Callable[[int], Awaitable[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[float] = loop.create_future()
        """Monotonic time at which the program began."""
        self.over = asyncio.Event()
        """Nobody waits for this agent any more."""
        self._reader = reader
        self._writer = writer
        self._kill_guardian = kill_guardian
        self._guardian: int | None = None
        self._lost = False

    async def ended(self) -> AgentEnd:
        """Waits until no process of the agent is left; LauncherLost when its guardian died without a word."""
        try:
            while True:
                message = await self._next()
                if isinstance(message, _Started):
                    self._guardian = message.guardian
                    if not self.started.done():
                        self.started.set_result(message.monotonic)
                elif self._lost and message.ended == "cancelled":
                    raise LauncherLost("the launcher died, and its agents with it")
                else:
                    return message
        finally:
            self.started.cancel()
            self._writer.close()
            self.over.set()

    async def _next(self) -> _Started | AgentEnd:
        try:
            size = struct.unpack("!I", await self._reader.readexactly(4))[0]
            if size > LONGEST:
                raise LauncherLost(NONSENSE)
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise LauncherLost("the process that guards the agent died") from error
        # It comes from where agents are: not to be taken as it is.
        try:
            message = json.loads(data)
            kind = {"started": _STARTED, "ended": _ENDED}[message.pop("event")]
            return kind.validate_python(message)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LauncherLost(NONSENSE) from error

    def cancel(self) -> None:
        self._send({"do": "cancel"})

    def kill(self) -> None:
        self._send({"do": "kill"})

    def lose(self) -> None:
        """The launcher is gone: a guardian that is left shall end its agent, which then counts as lost."""
        self._lost = True
        if not self._writer.is_closing():
            self._writer.write_eof()

    async def abandon(self) -> None:
        """For a guardian that does not answer: it is killed, and the launcher kills what it had."""
        if self._guardian is not None:
            await self._kill_guardian(self._guardian)

    def _send(self, message: dict[str, Any]) -> None:
        if not self._lost:
            self._writer.write(frame(message))


async def hand_over(
    agent: AgentStart, give: Callable[[int], Awaitable[None]], kill_guardian: Callable[[int], Awaitable[None]]
) -> RunningAgent:
    """Makes a channel, of which `give` gives one end (a descriptor) to a launcher, and says on it what to run."""
    ours, theirs = socket.socketpair()
    try:
        await give(theirs.fileno())
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(frame(agent._asdict()))
    return RunningAgent(reader, writer, kill_guardian)


def frame(message: dict[str, Any]) -> bytes:
    """A message as it goes over a channel: four bytes of length, then JSON."""
    data = json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data
