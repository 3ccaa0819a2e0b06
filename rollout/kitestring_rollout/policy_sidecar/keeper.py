"""Keeps the server at the version that is to be served: after pushes, restarts of the server, and its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kitestring_rollout.gateway.holds import Gate
from kitestring_rollout.policy_sidecar.config import PolicySidecarConfig
from kitestring_rollout.policy_sidecar.server import LoadFailed, Server, ServerAway, ServerRefused
from kitestring_rollout.policy_sidecar.versions import VersionMissing, Versions
from kitestring_rollout.protocol.policy_sidecar import LoadedWeights, ServedWeights
from kitestring_rollout.storage import FolderTorn, ObjectStore, StoreUnavailable
from kitestring_rollout.storage.published_weights import current_version, is_superseded

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class NotCurrent(Exception):
    """`current.json` names another version than the one that was told."""


PROBLEMS: Final = (
    NotCurrent,
    ServerAway,
    ServerRefused,
    LoadFailed,
    VersionMissing,
    FolderTorn,
    StoreUnavailable,
    OSError,
)
"""What may go wrong without being a bug: tried again."""
_MAX_BACKOFF_SECONDS: Final = 60.0


class Keeper:
    """State of the server, and the tasks that keep it current: `run` them until the process ends."""

    def __init__(self, config: PolicySidecarConfig, store: ObjectStore, server: Server) -> None:
        self._config = config
        self._store = store
        self._server = server
        self._versions = Versions(config.folder.absolute())
        self._lock = asyncio.Lock()
        self._look_now = asyncio.Event()
        self._doubted = False
        self._loading = False
        self._keeps_calls = False
        self._changed = 0.0
        self.gate = Gate()
        """Inference enters it; held while a server that tells no versions loads, so that each reply is of one."""
        self.linked = False
        """The server may start."""
        self.epoch: str | None = None
        """Of the server's process; None: away."""
        self.served: str | None = None
        """The version that the server serves; None: none of ours yet, or what a failed load left."""
        self.current: str | None = None
        self._ignored: str | None = None
        """What a trainer that was replaced has named since."""
        self.tells_versions = False
        """The server says of each token which version made it."""

    # --- what others ask ---

    @property
    def problem(self) -> str | None:
        """Why the pod is not ready; None: it serves the current version."""
        if self.epoch is None:
            return "the server is away"
        if self.current is None:
            return "no version has been published"
        if self._loading or self._doubted or self.served != self.current:
            return f"the server serves version {self.served}, current is {self.current}"
        return None

    @property
    def passes(self) -> bool:
        """Inference may go to the server: it serves a known version, or keeps calls while it changes to another."""
        return (self.served is not None or self._keeps_calls) and not self._doubted

    def status(self) -> ServedWeights:
        return ServedWeights(
            version=None if self._doubted else self.served,
            epoch=None if self._doubted else self.epoch,
            current=self.current,
        )

    def doubt(self) -> None:
        """A connection to the server failed: pass nothing on until it is known that it is the same process."""
        self._doubted = True
        self._look_now.set()

    async def take(self, version: str) -> LoadedWeights:
        """Have the server serve `version`. Raises PROBLEMS."""
        await self._read_current()
        await self._bring(version)
        assert self.epoch is not None
        return LoadedWeights(version=version, epoch=self.epoch)

    # --- the tasks ---

    async def run(self) -> None:
        """Never returns."""
        await self._link_first()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_server())
            tasks.create_task(self._keep_current())

    async def _link_first(self) -> None:
        """Bring the current version and let the server start on it."""
        failures = 0
        while True:
            try:
                await self._read_current()
                # a trainer may tell of a later one meanwhile: the server starts on what is there
                version = self.current
                if version is not None:
                    async with self._lock:
                        await in_daemon(self._versions.bring, self._store, version)
                    break
            except PROBLEMS as error:
                failures += 1
                _log.warning("the first weights are not there yet: %s", error)
            await asyncio.sleep(self._backoff(failures))
        self._versions.link(version)
        self.linked = True
        _log.info("version %s is there; the server starts on it", version)

    async def _watch_server(self) -> None:
        while True:
            await self._look()
            try:
                async with asyncio.timeout(self._config.poll_seconds):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    async def _look(self) -> None:
        self._look_now.clear()
        epoch = await self._server.look()
        if epoch != self.epoch:
            if epoch is None:
                _log.warning("the server is away")
            else:
                _log.info("the server is there, epoch %s", epoch)
            self.epoch, self.served, self._keeps_calls = epoch, None, False
        if not self._look_now.is_set():  # doubted anew meanwhile
            self._doubted = False

    async def _keep_current(self) -> None:
        failures = 0
        while True:
            try:
                await self._read_current()
                await self._catch_up()
                failures = 0
            except PROBLEMS as error:
                failures += 1
                _log.warning("the server cannot be brought to version %s: %s", self.current, error)
            await asyncio.sleep(self._backoff(failures))

    async def _catch_up(self) -> None:
        if self.current is None or self.current == self.served:
            return
        if self.served is not None and time.monotonic() - self._changed < self._config.takeover_seconds:
            # The trainer is about to tell; the bytes can come meanwhile.
            async with self._lock:
                await in_daemon(self._versions.bring, self._store, self.current)
        elif self.epoch is not None:
            await self._bring(self.current)

    def _backoff(self, failures: int) -> float:
        return min(_MAX_BACKOFF_SECONDS, self._config.poll_seconds * 2.0 ** min(failures, 10))

    async def _read_current(self) -> None:
        current = await in_daemon(current_version, self._store)
        if current is not None and is_superseded(current, self.current):
            if current != self._ignored:
                _log.warning("version %s is current in storage, of a trainer that was replaced: ignored", current)
            self._ignored = current
        elif current != self.current:
            self.current, self._changed = current, time.monotonic()

    # --- new weights ---

    async def _bring(self, version: str) -> None:
        """Return when the server serves the version."""
        async with self._lock:
            # A trainer names a version before it tells of it: a file that is behind was written over by an earlier one.
            overrules = self.current is not None and is_superseded(self.current, version)
            if version != self.current and not overrules:
                raise NotCurrent(f"current.json names version {self.current}, not {version}")
            if self.epoch is None or self._doubted:
                await self._look()
            if self.epoch is None:
                raise ServerAway("the server is away")
            if self.served != version:
                await in_daemon(self._versions.bring, self._store, version)
                await self._load(version)
            if self.current is not None and is_superseded(self.current, version):
                self.current = version

    async def _load(self, version: str) -> None:
        epoch, before = self.epoch, self.served
        self._loading = True
        try:
            if before is not None:
                await self._exchange(version, before)
            elif not await self._serves_already(version):
                await self._exchange(version, before)
                self.tells_versions = await self._server.tells_versions()
        except ServerAway:
            self.doubt()
            raise
        finally:
            self._loading = self._keeps_calls = False
            self.gate.release()
        if self.epoch != epoch:
            raise ServerAway("the server was restarted meanwhile")
        self.served = version
        self._versions.link(version)
        await in_daemon(self._versions.keep, {version, before})
        _log.info("the server serves version %s", version)

    async def _exchange(self, version: str, before: str | None) -> None:
        keeps = before is None or self.tells_versions
        if not keeps:
            seconds = self._config.load_seconds
            await self.gate.hold(drain_seconds=seconds, hold_seconds=3 * seconds)
        await self._server.pause("keep" if keeps else "wait")
        self.served, self._keeps_calls = None, keeps and before is not None
        try:
            await self._server.load(self._versions.folder(version), version)
        except ServerRefused:
            await self._server.resume()
            self.served = before
            raise

    async def _serves_already(self, version: str) -> bool:
        """A server that an earlier sidecar process has left at that version; what tells none is loaded anew."""
        if await self._server.version() != version or await self._server.paused():
            return False
        self.tells_versions = await self._server.tells_versions()
        return self.tells_versions


async def in_daemon(work: Callable[..., Result], *arguments: Any) -> Result:
    """As `asyncio.to_thread`, in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[Result | None, BaseException | None] = (work(*arguments), None)
        except BaseException as error:  # noqa: BLE001 -- handed on to who waits
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True, name=getattr(work, "__name__", "work")).start()
    return await done
