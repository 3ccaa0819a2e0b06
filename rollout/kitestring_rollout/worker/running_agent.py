"""One agent as the worker sees it, whatever launcher started it, and what a launcher is."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import TypeAdapter

from kitestring_rollout.launcher.launcher import AgentEnd, AgentStart

START_SECONDS = 60.0
"""A guardian that has not said within this time that it begins its agent is given up."""


NONSENSE = "the process that guards the agent said what makes no sense"


class _Launching(NamedTuple):
    guardian: int


class _Started(NamedTuple):
    monotonic: float


_Message = _Launching | _Started | AgentEnd
_KINDS: Mapping[str, TypeAdapter[_Message]] = {
    "launching": TypeAdapter(_Launching),
    "started": TypeAdapter(_Started),
    "ended": TypeAdapter(AgentEnd),
}


class CannotLaunch(Exception):
    """No agent of this worker can be started: the user's mistake, the text says what to mend. It will not go away."""


class LauncherLost(Exception):
    """The launcher died."""


class LauncherKilled(LauncherLost):
    """The launcher was killed with all that ran beside it, while the agent did.

    What does that in a pod is the kernel, which ends a whole container for its memory (memory.oom.group): the agents'
    doing, as under GuardianEnded.
    """


class GuardianLost(Exception):
    """The guardian of an agent died before there was the agent, or is not one of ours."""


class GuardianEnded(Exception):
    """The guardian died, or does not answer, while its agent ran and the launcher lives on.

    Who does that is the agent, which has the same user: by a signal, or by taking all memory. It counts as its failure:
    otherwise an agent whose task goes badly could get another try.
    """


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


class GuardianKeeper(Protocol):
    """What a launcher does for an agent that it has started."""

    async def kill_guardian(self, pid: int) -> None: ...

    async def lives_on(self) -> bool:
        """Whether the end of a guardian, just seen, has another cause than the launcher's own."""

    async def was_killed(self) -> bool:
        """Whether a launcher that does not live on was killed alone, and not with what this worker is a part of."""


LONGEST = 1 << 28
"""Bytes of a message of a guardian: of the most that it may hold (`output.maxBytes` of JSON) and a good deal more."""


class RunningAgent:
    """One agent: `started` and `ended` are futures; `cancel` gives it the grace, `kill` none."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        launcher: GuardianKeeper,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.launching: asyncio.Future[None] = loop.create_future()
        """From now on the guardian is within reach of the agent."""
        self.started: asyncio.Future[float] = loop.create_future()
        """Monotonic time at which the program began."""
        self.over = asyncio.Event()
        """Nobody waits for this agent any more."""
        self._reader = reader
        self._writer = writer
        self._launcher = launcher
        self._guardian: int | None = None
        self._lost = False
        self._exposed = False

    @property
    def was_launched(self) -> bool:
        """Whether there was a process of the agent, or was about to be."""
        return self._guardian is not None

    async def ended(self) -> AgentEnd:
        """Waits until no process of the agent is left. LauncherLost, GuardianLost, GuardianEnded."""
        try:
            while True:
                message = await self._next()
                if message is None or (self._lost and isinstance(message, AgentEnd) and message.ended == "cancelled"):
                    raise await self._loss("died")
                if isinstance(message, AgentEnd):
                    return message
                if isinstance(message, _Launching):
                    self._guardian = message.guardian
                    if not self.launching.done():
                        self.launching.set_result(None)
                elif not self.started.done():
                    self.started.set_result(message.monotonic)
        finally:
            self.launching.cancel()
            self.started.cancel()
            self._writer.close()
            self.over.set()

    async def _loss(self, how: str) -> LauncherLost | GuardianLost | GuardianEnded:
        """What it means that the guardian is no more."""
        if not self._exposed and (self._lost or not await self._launcher.lives_on()):
            if self.was_launched and await self._launcher.was_killed():
                return LauncherKilled("the container of the agents was killed while they ran, as for their memory")
            return LauncherLost("the launcher died, and its agents with it")
        if self._guardian is None:
            return GuardianLost(f"the process that guards the agent {how}")
        return GuardianEnded(f"the process that guards the agent {how} while it ran: the agent's own doing")

    async def _next(self) -> _Message | None:
        """None: the guardian is gone."""
        try:
            size = struct.unpack("!I", await self._reader.readexactly(4))[0]
            if size > LONGEST:
                raise GuardianLost(NONSENSE)
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        # It comes from where agents are: not to be taken as it is.
        try:
            message = json.loads(data)
            return _KINDS[message.pop("event")].validate_python(message)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise GuardianLost(NONSENSE) from error

    def cancel(self) -> None:
        self._send({"do": "cancel"})

    def kill(self) -> None:
        self._send({"do": "kill"})

    def lose(self) -> None:
        """The launcher is gone: a guardian that is left shall end its agent, which then counts as lost."""
        self._lost = True
        if not self._writer.is_closing():
            self._writer.write_eof()

    def expose(self) -> None:
        """What forks the agents died while this one ran, and the launcher says so with its last word: somebody who runs
        there ended it, and its guardian goes with it."""
        self._exposed = True

    async def abandon(self) -> LauncherLost | GuardianLost | GuardianEnded:
        """For a guardian that does not answer: it is killed, and the launcher kills what it had. What that means."""
        loss = await self._loss("did not answer")
        if self._guardian is not None:
            await self._launcher.kill_guardian(self._guardian)
        return loss

    def _send(self, message: dict[str, Any]) -> None:
        if not self._lost:
            self._writer.write(frame(message))


async def hand_over(
    agent: AgentStart, give: Callable[[int], Awaitable[None]], launcher: GuardianKeeper
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
    return RunningAgent(reader, writer, launcher)


def frame(message: dict[str, Any]) -> bytes:
    """A message as it goes over a channel: four bytes of length, then JSON."""
    data = json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data
