"""Sending a call to a model's server: pooled connections, routing over replicas, retries of refused connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
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
AVOID_SECONDS: Final = 1.0
"""A server that could not take a call is asked last for so long."""
UNAVAILABLE: Final = 503
"""Said by a policy's server, or its sidecar, that has generated nothing: away, paused, or not at the run's weights."""


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
        self._avoided: dict[str, float] = {}

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

    async def post(
        self, model: Model, api: Api, payload: bytes, attempt: str, away: Callable[[], None]
    ) -> aiohttp.ClientResponse:
        """The reply's head; its body is still to be read. Refusal 502 when there is none. `away` is called before each
        wait for a server to come back.

        A call that no server has begun is tried again briefly, at every server of the model: a connection that cannot
        be made, and, of a policy's own servers, a reply of 503. One that broke off before its reply began is made anew
        once, by a policy's own servers.
        """
        session = self._sessions[model.name]
        deadline = 0.0
        backoff = FIRST_BACKOFF_SECONDS
        broken = 0
        while True:
            refused: Exception | None = None
            for server in self._order(model, attempt):
                try:
                    reply = await session.post(self._url(server, api), data=payload, allow_redirects=False)
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                    refused = error
                except (aiohttp.ClientError, OSError) as error:
                    broken += 1
                    if broken > 1 or not model.trained:
                        raise upstream_failed(f"the model server did not answer: {type(error).__name__}") from error
                    refused = error
                else:
                    if reply.status != UNAVAILABLE or not model.trained:
                        return reply
                    reply.close()
                self._avoided[server] = time.monotonic() + AVOID_SECONDS
            now = time.monotonic()
            if not deadline:
                deadline = now + self._connect_seconds
            if now + backoff > deadline:
                raise upstream_failed(f"no server of model {model.name!r} can be reached") from refused
            away()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _order(self, model: Model, attempt: str) -> tuple[str, ...]:
        """The servers to try; those that failed just now last."""
        servers = model.servers_for(attempt)
        if not self._avoided or len(servers) == 1:
            return servers
        now = time.monotonic()
        self._avoided = {server: until for server, until in self._avoided.items() if until > now}
        return tuple(sorted(servers, key=self._avoided.__contains__))

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
