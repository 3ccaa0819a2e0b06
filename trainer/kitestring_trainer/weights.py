"""New weights to the policy servers: hold the gateways, reload each server between two tokens, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.queue.gateways import Gateways

logger = logging.getLogger(__name__)

REASON_WEIGHTS_NOT_SERVED = "WeightsNotServed"


class ServerUnreachableError(Exception):
    """A policy server did not answer, or answered 5xx."""


class PolicyServers:
    """The servers of the trained policy, by their base URLs; vLLM's development routes."""

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
    ) -> None:
        """`drain_seconds`: how long calls in flight may end before the servers pause with their state kept.
        `patience_seconds`: how long an unreachable server is tried again."""
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._policy = policy
        self._gateways = gateways
        self._session = session
        self._drain_seconds = drain_seconds
        self._patience_seconds = patience_seconds
        self._load_seconds = load_seconds
        self._changing = asyncio.Lock()
        self._served: tuple[Path, str] | None = None

    async def push(self, folder: Path, version: str) -> None:
        """Return when every server serves the weights in `folder` as `version`. Raises RunFailedError.

        Calls are held at the gateways meanwhile; what is generating past the drain goes on under the new weights, and
        its tokens say from which version each came.
        """
        async with self._changing:
            await asyncio.gather(
                *(self._gateways.hold(url, self._policy, self._drain_seconds) for url in self._gateways.urls)
            )
            await self._load_everywhere(folder, version)
            self._served = (folder, version)
            await asyncio.gather(*(self._gateways.release(url, self._policy, version) for url in self._gateways.urls))

    async def join(self, url: str) -> None:
        """Have one more server serve the current weights; from then on it gets every version.

        Raises ServerUnreachableError when it cannot yet, RunFailedError when it refuses.
        """
        while True:
            served = self._served
            if served is None:
                await self._ask("GET", url, "/weight_info")
            elif await self._reported(url) != served[1]:
                await self._load_once(url, *served)
            async with self._changing:
                if self._served == served:  # else another version was pushed meanwhile, and not to this server
                    self._urls = (*(known for known in self._urls if known != url), url)
                    return

    def leave(self, url: str) -> None:
        """The server gets no version any more."""
        self._urls = tuple(known for known in self._urls if known != url)

    async def watch(self, every_seconds: float) -> None:
        """Bring a server that was restarted, and serves other weights than the last pushed ones, back to them."""
        while True:
            await asyncio.sleep(every_seconds)
            async with self._changing:
                if self._served is None:
                    continue
                folder, version = self._served
                for url in self._urls:
                    found = await self._reported(url)
                    if found is not None and found != version:
                        logger.warning("policy server %s serves version %s, wanted %s: loading", url, found, version)
                        await self._load(url, folder, version)

    async def _reported(self, url: str) -> str | None:
        """The version that the server says it serves; None when it cannot be asked."""
        try:
            return str((await self._ask("GET", url, "/weight_info"))["weight_version"])
        except (ServerUnreachableError, KeyError):
            return None

    async def _load_everywhere(self, folder: Path, version: str) -> None:
        await asyncio.gather(*(self._load(url, folder, version) for url in self._urls))

    async def _load(self, url: str, folder: Path, version: str) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ServerUnreachableError),
            wait=wait_random_exponential(multiplier=0.1, max=2),
            stop=stop_after_delay(self._patience_seconds),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._load_once(url, folder, version)
        except ServerUnreachableError as error:
            message = f"policy server {url} did not take version {version}: {error}"
            raise RunFailedError(REASON_WEIGHTS_NOT_SERVED, message) from error

    async def _load_once(self, url: str, folder: Path, version: str) -> None:
        """Every part may be repeated: a second try after an error begins anew."""
        await self._ask("POST", url, "/pause?mode=keep")
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._ask("POST", url, "/collective_rpc", arguments, self._load_seconds)
        await self._ask("POST", url, "/reset_prefix_cache")
        await self._ask("POST", url, "/update_weight_version", {"new_version": version})
        await self._ask("POST", url, "/resume")
        found = (await self._ask("GET", url, "/weight_info")).get("weight_version")
        if found != version:
            raise ServerUnreachableError(f"it reports version {found} after the reload")

    async def _ask(
        self, method: str, url: str, path: str, body: dict[str, Any] | None = None, seconds: float = 60.0
    ) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, url + path, json=body, timeout=limit) as response:
                if response.status >= 500:
                    raise ServerUnreachableError(f"{path}: {response.status} {(await response.text())[:300]}")
                if response.status >= 400:
                    text = (await response.text())[:300]
                    raise RunFailedError(
                        REASON_WEIGHTS_NOT_SERVED, f"policy server {url}{path} refused: {response.status} {text}"
                    )
                if not response.content_type.endswith("json"):
                    return {}
                answer = await response.json()
                return answer if isinstance(answer, dict) else {}
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise ServerUnreachableError(f"{path}: {type(error).__name__} {error}".strip()) from error
