"""Sending a call to a model's server: pooled connections, routing over replicas, retries of refused connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final

import aiohttp
from yarl import URL

from kitestring_rollout.gateway.errors import JSON_TYPE, upstream_failed
from kitestring_rollout.gateway.models import Model
from kitestring_rollout.traces.records import Api

PATHS: Final[dict[Api, str]] = {"chat": "/chat/completions", "completions": "/completions"}

KEEPALIVE_SECONDS: Final = 3.0
"""Below the 5 s after which uvicorn, hence vLLM, closes an idle connection: a request must not meet that close."""
CONNECT_SECONDS: Final = 5.0
FIRST_BACKOFF_SECONDS: Final = 0.05
MAX_BACKOFF_SECONDS: Final = 0.5


class Upstream:
    """The client side of the gateway; an async context manager.

    A reply may take as long as its attempt: no timer runs per call, the fence ends what hangs.
    """

    def __init__(self, models: Iterable[Model], *, connect_seconds: float) -> None:
        self._models = tuple(models)
        self._connect_seconds = connect_seconds
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._connector: aiohttp.TCPConnector | None = None
        self._urls: dict[tuple[str, Api], URL] = {}

    async def __aenter__(self) -> Upstream:
        self._connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        for model in self._models:
            self._sessions[model.name] = aiohttp.ClientSession(
                connector=self._connector,
                connector_owner=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                headers=_headers(model),
                read_bufsize=1 << 18,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()
        if self._connector is not None:
            await self._connector.close()

    async def post(self, model: Model, api: Api, payload: bytes, attempt: str) -> aiohttp.ClientResponse:
        """The reply's head; its body is still to be read. A connection that cannot be made is tried again briefly, at
        every server of the model; nothing was sent by then. Refusal 502 when there is no reply."""
        session = self._sessions[model.name]
        deadline = 0.0
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            for server in model.servers_for(attempt):
                try:
                    return await session.post(self._url(server, api), data=payload, allow_redirects=False)
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                    refused = error
                except (aiohttp.ClientError, OSError) as error:
                    raise upstream_failed(f"the model server did not answer: {type(error).__name__}") from error
            now = time.monotonic()
            if not deadline:
                deadline = now + self._connect_seconds
            if now + backoff > deadline:
                raise upstream_failed(f"no server of model {model.name!r} can be reached") from refused
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _url(self, server: str, api: Api) -> URL:
        url = self._urls.get((server, api))
        if url is None:
            url = self._urls[server, api] = URL(server + PATHS[api])
        return url


def _headers(model: Model) -> dict[str, str]:
    """All that is sent: given here once, where aiohttp would add its own to every request."""
    headers = {
        "Content-Type": JSON_TYPE,
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "User-Agent": "kitestring-gateway",
    }
    if model.api_key is not None:
        headers["Authorization"] = f"Bearer {model.api_key}"
    return headers
