"""A launcher in another container: it comes to a socket of ours, and when it goes another one may.

Agents run beside the launcher, as the same user and with the same folders, and must never be taken for it. So the
socket is there only while no agent can be: a launcher holds a lock (`flock` on a file beside the socket) from before
its first agent until it dies, and the worker listens only when nobody holds that lock. One connection is taken; then
the socket is removed. A launcher that ends has ended its agents before. When the first process of a container is
killed, the kernel closes its files, the lock included, and in the same exit kills every other process of the
container; SETTLE_SECONDS cover the moment in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kitestring_rollout.launcher.launcher import AgentStart
from kitestring_rollout.worker import control
from kitestring_rollout.worker.running_agent import (
    CannotLaunch,
    LauncherLost,
    RunningAgent,
    frame,
    hand_over,
    import_failed,
    import_took_too_long,
)

log = logging.getLogger(__name__)

LOCK_NAME = "launcher.lock"
SETTLE_SECONDS = 1.0
LOCK_POLL_SECONDS = 0.05
RETURN_SECONDS = 15.0
"""How long an agent waits for a launcher to come back before its attempt is lost."""
ANSWER_SECONDS = 10.0
"""How long a launcher may take to say that it is there."""
GOODBYE_SECONDS = 10.0
"""How long a launcher that was told to end may take."""
ALONE_SECONDS = 5.0
"""A worker that is not told to end either so long after its launcher was killed is in no pod that is being ended: where
an eviction leaves no time, a node kills all containers without a word."""


@dataclass(frozen=True, slots=True)
class PodPlan:
    """What a launcher in another container hears first (rollout/launcher/messages.go)."""

    preload: tuple[str, ...]
    program: tuple[str, str] | None
    """What to fork from the preloaded modules; None: agents are executed."""
    interpreter: tuple[str, ...]
    """With a program: the agent's Python and its options."""
    env: Mapping[str, str]
    """Of the interpreter, over the container's own."""
    defaults: Mapping[str, str]
    """Below the container's own."""
    cwd: str
    """Of the interpreter; empty: the container's."""
    scratch: str
    """Folder of the agents' scratch folders; the launcher makes it, or sweeps out what earlier ones left."""


class LauncherSocket:
    """Takes one launcher at a time."""

    def __init__(
        self,
        path: Path,
        plan: PodPlan,
        *,
        uid: int | None,
        ready_seconds: float,
        stopping: asyncio.Event,
        broken: CannotLaunch | None = None,
    ) -> None:
        """`uid`: the user that the launcher must run as. `broken` says beforehand why no agent can be started.
        `stopping`: this worker is to end."""
        self._path = path
        self._lock_file = path.parent / LOCK_NAME
        self._plan = plan
        self._uid = uid
        self._ready_seconds = ready_seconds
        self._stopping = stopping
        self._always_broken = broken
        self._broken: CannotLaunch | None = None
        self._control: socket.socket | None = None
        self._here = asyncio.Event()
        self._agents: set[RunningAgent] = set()
        self._asked: list[asyncio.Future[bool]] = []
        self._closing = False
        self._settled = True
        self._serving: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begins to listen; OSError when there can be no socket at the path."""
        self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._settled = not self._lock_file.exists()  # nobody was here before us
        self._lock_file.touch(mode=0o644)
        self._bound().close()
        self._path.unlink()
        self._serving = asyncio.create_task(self._serve())

    @property
    def present(self) -> bool:
        return self._here.is_set()

    async def ready(self) -> None:
        if self._serving is None:
            raise RuntimeError("not open")
        here = asyncio.create_task(self._here.wait())
        try:
            await asyncio.wait({here, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            here.cancel()
        if self._serving.done():
            self._serving.result()  # which never ends but by an error
        if self._broken is not None:
            raise self._broken

    async def start(self, agent: AgentStart) -> RunningAgent:
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                await self.ready()
            running = await hand_over(agent, self._give, self)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            raise LauncherLost("the container `agent` ended, and its launcher did not come back in time") from None
        self._agents = {one for one in self._agents if not one.over.is_set()} | {running}
        return running

    async def close(self, done: bool = False) -> None:
        if self._serving is None:
            return
        self._closing = True
        if self._control is not None:
            with contextlib.suppress(OSError):  # it has just gone by itself
                await control.tell(self._control, {"end": "done" if done else "stopped"})
            await asyncio.wait({self._serving}, timeout=GOODBYE_SECONDS)
        self._serving.cancel()
        await asyncio.wait({self._serving})
        if not self._serving.cancelled():
            self._serving.result()

    async def _give(self, fd: int) -> None:
        if self._control is None:
            raise BrokenPipeError
        await control.give(self._control, b"start", fd)

    async def kill_guardian(self, pid: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the launcher has just gone, and with it its guardians
                await control.tell(self._control, {"kill": pid})

    async def lives_on(self) -> bool:
        """One that answers now was not killed with the whole container, as for its memory; nor was one that does not,
        and is still connected long after: agents can take all time of the processors from it."""
        if self._control is None:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await control.tell(self._control, {"ask": True})
                return await answer
        except TimeoutError:
            return self._control is not None
        except OSError:  # it has just gone
            return False
        finally:
            self._asked.remove(answer)

    async def was_killed(self) -> bool:
        """Of a pod that is being ended this worker is told by the kubelet. What a launcher says counts nothing here:
        agents can have it say what they like."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALONE_SECONDS):
                await self._stopping.wait()
        return not self._stopping.is_set()

    def _tell_who_asked(self, lives: bool) -> None:
        for answer in self._asked:
            if not answer.done():
                answer.set_result(lives)

    async def _serve(self) -> None:
        while not self._closing:
            with await self._accept() as launcher:
                try:
                    self._broken = self._always_broken or await self._handshake(launcher)
                except LauncherLost as error:
                    log.warning("%s", error)
                    continue
                self._control = launcher
                self._here.set()
                while (message := await control.hear(launcher)) is not None:
                    self._note(message)
                self._here.clear()
                self._control = None
                self._tell_who_asked(False)
            if not self._closing:
                log.warning("the launcher went; its agents are lost")
            for agent in self._agents:
                agent.lose()
            await asyncio.gather(*(agent.over.wait() for agent in self._agents))

    def _note(self, message: dict[str, Any]) -> None:
        if "here" in message:
            self._tell_who_asked(True)
        elif "exposed" in message:
            log.warning("the interpreter that forks the agents was ended while they ran")
            for agent in self._agents:
                agent.expose()
            self._tell_who_asked(True)

    async def _accept(self) -> socket.socket:
        """The next launcher. Nobody can connect before a launcher that may have agents has ended, nor after this."""
        await self._unlocked()
        with self._bound() as listener:
            try:
                listener.listen(1)
                while True:
                    launcher, _ = await asyncio.get_running_loop().sock_accept(listener)
                    if self._is_welcome(launcher):
                        return launcher
                    launcher.close()
            finally:
                self._path.unlink(missing_ok=True)

    async def _unlocked(self) -> None:
        with self._lock_file.open() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._settled = False
                    await asyncio.sleep(LOCK_POLL_SECONDS)
                else:
                    break
        if not self._settled:
            await asyncio.sleep(SETTLE_SECONDS)
        self._settled = False

    def _bound(self) -> socket.socket:
        """A socket at the path, which does not listen yet."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            self._path.chmod(0o666)  # to connect needs the right to write
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener

    def _is_welcome(self, launcher: socket.socket) -> bool:
        launcher.setblocking(False)
        _, uid, _ = struct.unpack("3i", launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if self._uid in (None, uid):
            return True
        log.error("user %d came to %s as a launcher: refused, launcher_uid is %d", uid, self._path, self._uid)
        return False

    async def _handshake(self, launcher: socket.socket) -> CannotLaunch | None:
        """Says the plan; returns why no agent can be started, if so. LauncherLost."""
        try:
            await self._say_plan(launcher)
            async with asyncio.timeout(self._ready_seconds):
                answer = await control.hear(launcher)
        except OSError as error:  # TimeoutError is one
            if isinstance(error, TimeoutError):
                return import_took_too_long(self._plan.preload, self._ready_seconds)
            answer = None
        if answer is None:
            raise LauncherLost("the launcher ended before it was ready; the log of the container `agent` says more")
        if "broken" in answer:
            return CannotLaunch(str(answer["broken"]))
        if "failed" in answer:
            return import_failed(self._plan.interpreter[0], self._plan.preload, str(answer["failed"]))
        for note in answer.get("notes", ()):
            log.warning("%s", note)
        log.info("launcher ready: %s", answer.get("ready"))
        return None

    async def _say_plan(self, launcher: socket.socket) -> None:
        """On a channel of its own: the variables of a container may be longer than a message of the control socket."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                await control.give(launcher, b"plan", theirs.fileno())
            ours.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(ours, frame(asdict(self._plan)))
