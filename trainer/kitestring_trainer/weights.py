"""New weights to the policy servers: hold the gateways, reload each server between two tokens, release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.queue.gateways import Gateways
from kitestring_trainer.server_weights import (
    REASON_WEIGHTS_NOT_SERVED,
    DirectWeights,
    ServerUnreachableError,
    ServerWeights,
    SidecarWeights,
    WeightsGoneError,
)
from kitestring_trainer.weights_publisher import WeightsPublisher

__all__ = ["REASON_WEIGHTS_NOT_SERVED", "PolicyServers", "ServerUnreachableError", "WeightsPublisher"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 2.0


class PolicyServers:
    """The servers of the trained policy, by their base URLs.

    On one machine (no `publisher`): vLLM's development routes, and every server must take every version.

    In a cluster (`publisher` and `credential`): a version goes to storage first, then each pod's sidecar is told. A
    server that cannot be reached while others serve the version is left out: gateways are told to do without it, until
    `watch` finds that it serves the version, which its sidecar brings it to by itself.
    """

    def __init__(
        self,
        urls: Sequence[str],
        policy: str,
        gateways: Gateways,
        session: aiohttp.ClientSession,
        *,
        drain_seconds: float,
        patience_seconds: float = 120.0,
        load_seconds: float = 1800.0,
        publisher: WeightsPublisher | None = None,
        credential: str = "",
        spare_seconds: float = 5.0,
    ) -> None:
        """`drain_seconds`: how long calls in flight may end before the servers pause with their state kept.
        `patience_seconds`: how long an unreachable server is tried again. `load_seconds`: for a version to be fetched
        and loaded; in a cluster also for the first server to start. `credential`: bearer of the sidecars, the same as
        the gateways'. `spare_seconds`: how long an unreachable server is tried again once others serve the version."""
        self._urls = _clean(urls)
        self._policy = policy
        self._gateways = gateways
        self._drain_seconds = drain_seconds
        self._patience_seconds = patience_seconds
        self._start_seconds = load_seconds if publisher is not None else patience_seconds
        self._spare_seconds = spare_seconds
        self._publisher = publisher
        self._servers: ServerWeights = (
            DirectWeights(session, load_seconds)
            if publisher is None
            else SidecarWeights(session, credential, load_seconds)
        )
        self._changing = asyncio.Lock()
        self._served: tuple[Path, str] | None = None
        self._left_out: frozenset[str] = frozenset()

    @property
    def left_out(self) -> frozenset[str]:
        """Servers that gateways are to do without for now."""
        return self._left_out

    async def offer(self, folder: Path, version: str) -> None:
        """In a cluster: let servers start on these weights, and do not wait for them. Raises as `push`."""
        async with self._changing:
            if self._publisher is not None and self._served is None:
                await asyncio.to_thread(self._publisher.publish, folder, version)
                await asyncio.to_thread(self._publisher.set_current, version)

    async def push(self, folder: Path, version: str) -> None:
        """Return when every server serves the weights in `folder` as `version`; in a cluster: when all that can be
        reached do, at least one. Raises RunFailedError.

        Calls are held at the gateways meanwhile; what is generating past the drain goes on under the new weights, and
        its tokens say from which version each came. In a cluster the same version again does nothing.
        """
        async with self._changing:
            before = self._served
            if self._publisher is not None:
                if before is not None and before[1] == version:
                    return
                await asyncio.to_thread(self._publisher.publish, folder, version)
            await asyncio.gather(
                *(self._gateways.hold(url, self._policy, self._drain_seconds) for url in self._gateways.urls)
            )
            if self._publisher is not None:
                await asyncio.to_thread(self._publisher.set_current, version)
            await self._load_everywhere(folder, version)
            self._served = (folder, version)
            await asyncio.gather(*(self._gateways.release(url, self._policy, version) for url in self._gateways.urls))
            if self._publisher is not None:
                kept = {version} if before is None else {version, before[1]}
                await asyncio.to_thread(self._publisher.keep, kept)

    async def join(self, url: str) -> None:
        """Have one more server serve the current weights; from then on it gets every version.

        Raises ServerUnreachableError when it cannot yet, RunFailedError when it refuses.
        """
        while True:
            served = self._served
            found = await self._servers.version(url)
            if served is not None and found != served[1]:
                try:
                    await self._servers.load(url, *served)
                except WeightsGoneError as error:  # another version was pushed meanwhile
                    raise ServerUnreachableError(str(error)) from error
            async with self._changing:
                if self._served == served:  # else another version was pushed meanwhile, and not to this server
                    self._urls = (*(known for known in self._urls if known != url), url)
                    return

    def leave(self, url: str) -> None:
        """The server gets no version any more."""
        self._urls = tuple(known for known in self._urls if known != url)
        self._left_out -= {url}

    async def watch(self, every_seconds: float) -> None:
        """On one machine: bring a server that was restarted, and serves other weights than the last pushed ones, back
        to them. In a cluster: have gateways use those that were left out again."""
        while True:
            await asyncio.sleep(every_seconds)
            async with self._changing:
                if self._served is None:
                    continue
                if self._publisher is None:
                    await self._bring_back(*self._served)
                elif self._left_out:
                    await self._take_in(self._served[1])

    async def _bring_back(self, folder: Path, version: str) -> None:
        for url in self._urls:
            found = await self._found(url)
            if found is not None and found != version:
                logger.warning("policy server %s serves version %s, wanted %s: loading", url, found, version)
                problem = await self._load(url, folder, version, set(), self._patience_seconds)
                if problem is not None:
                    raise problem

    async def _take_in(self, version: str) -> None:
        back = {url for url in self._left_out if await self._found(url) == version}
        if back:
            logger.info("policy servers that serve version %s again: %s", version, ", ".join(sorted(back)))
            self._left_out -= back
        await (
            self._tell_gateways()
        )  # also of those that are still away: a gateway that was restarted has all in its list

    async def _found(self, url: str) -> str | None:
        """The version that the server says it serves; None when it says none, or cannot be asked."""
        try:
            return await self._servers.version(url)
        except ServerUnreachableError:
            return None

    async def _load_everywhere(self, folder: Path, version: str) -> None:
        served: set[str] = set()
        patience = self._patience_seconds if self._served is not None else self._start_seconds
        urls = self._urls
        problems = await asyncio.gather(*(self._load(url, folder, version, served, patience) for url in urls))
        failed = {url: problem for url, problem in zip(urls, problems, strict=True) if problem is not None}
        if failed and (self._publisher is None or not served):
            raise next(iter(failed.values()))
        if failed.keys() == self._left_out:
            return
        for problem in failed.values():
            logger.warning("%s; gateways do without it", problem)
        self._left_out = frozenset(failed)
        await self._tell_gateways()

    async def _tell_gateways(self) -> None:
        servers = [url for url in self._urls if url not in self._left_out]
        if servers:
            await asyncio.gather(
                *(self._gateways.put_servers(url, self._policy, servers) for url in self._gateways.urls)
            )

    async def _load(
        self, url: str, folder: Path, version: str, served: set[str], patience: float
    ) -> RunFailedError | None:
        """Have one server serve the version, and put it into `served`; what is wrong when it cannot be reached."""
        failing_since: float | None = None
        pause = _FIRST_PAUSE_SECONDS
        published_again = False
        while True:
            try:
                await self._servers.load(url, folder, version)
            except WeightsGoneError as error:
                if self._publisher is None or published_again:
                    raise RunFailedError(
                        REASON_WEIGHTS_NOT_SERVED, f"version {version} in storage: {error}", restart_helps=True
                    ) from error
                logger.warning("version %s is published again: %s", version, error)
                await asyncio.to_thread(self._publisher.publish, folder, version)
                published_again = True
            except ServerUnreachableError as error:
                now = time.monotonic()
                failing_since = failing_since or now
                spared = self._publisher is not None and bool(served)
                if now - failing_since >= (min(self._spare_seconds, patience) if spared else patience):
                    message = f"policy server {url} did not take version {version}: {error}"
                    return RunFailedError(REASON_WEIGHTS_NOT_SERVED, message, restart_helps=self._publisher is not None)
                await asyncio.sleep(pause)
                pause = min(_MAX_PAUSE_SECONDS, pause * 2)
            else:
                served.add(url)
                return None


def _clean(urls: Sequence[str]) -> tuple[str, ...]:
    return tuple(url.rstrip("/") for url in urls)
