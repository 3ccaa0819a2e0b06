"""Inference through the sidecar: bytes in, bytes out, chunk by chunk; a client that goes away ends the generation."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import aiohttp
from aiohttp import web

from kitestring_api import names
from kitestring_rollout.policy_sidecar.keeper import Keeper

_WHOLE_BYTES: Final = 1 << 20
"""A reply that says it is shorter is passed on in one piece."""
_REQUEST_HEADERS: Final = ("Content-Type", "X-Request-Id")
_REPLY_HEADERS: Final = ("Content-Type", "Cache-Control", "Retry-After")


class Passing:
    """Passes requests of named routes on; whatever else the server has cannot be reached through it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, keeper: Keeper) -> None:
        self._session = session
        self._url = url
        self._keeper = keeper

    async def infer(self, request: web.Request, path: str) -> web.StreamResponse:
        """A call: only while the server serves a known version, else 503, which says that nothing was generated."""
        keeper = self._keeper
        body = await request.read()
        await keeper.gate.enter()
        try:
            if not keeper.passes:
                return unavailable("the policy server is away, or serves no version of this run yet")
            headers = {}
            if not keeper.tells_versions and keeper.served is not None:
                headers[names.HEADER_POLICY_VERSION] = keeper.served
            return await self._pass(request, path, body, headers)
        finally:
            keeper.gate.leave()

    async def look(self, request: web.Request, path: str) -> web.StreamResponse:
        """What the server says of itself, at any time."""
        return await self._pass(request, path, None, {})

    async def _pass(
        self, request: web.Request, path: str, body: bytes | None, headers: dict[str, str]
    ) -> web.StreamResponse:
        sent = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
        method = "GET" if body is None else "POST"
        try:
            reply = await self._session.request(method, self._url + path, data=body, headers=sent)
        except (aiohttp.ClientError, OSError) as error:
            self._keeper.doubt()
            return unavailable(f"the policy server did not answer: {type(error).__name__}")
        finished = False
        try:
            response = await self._relay(request, reply, headers)
            finished = True
            return response
        finally:
            if not finished:
                reply.close()  # the server sees it, and generates no further

    async def _relay(
        self, request: web.Request, reply: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        headers |= {name: reply.headers[name] for name in _REPLY_HEADERS if name in reply.headers}
        length = reply.content_length
        if length is not None and length <= _WHOLE_BYTES:
            try:
                return web.Response(status=reply.status, body=await reply.read(), headers=headers)
            except aiohttp.ClientError as error:
                self._keeper.doubt()
                return unavailable(f"the policy server's reply broke off: {type(error).__name__}")
        response = web.StreamResponse(status=reply.status, headers=headers)
        response.content_length = length
        await response.prepare(request)
        try:
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientConnectionResetError:
            raise  # the client went away
        except aiohttp.ClientError as error:
            self._keeper.doubt()
            if request.transport is not None:
                request.transport.abort()  # so that the client does not take what it got for the whole
            raise asyncio.CancelledError from error
        await response.write_eof()
        return response


def unavailable(message: str) -> web.Response:
    """503 in OpenAI's shape: nothing was generated, another server may be asked."""
    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
    return web.Response(status=503, text=json.dumps({"error": error}), content_type="application/json")
