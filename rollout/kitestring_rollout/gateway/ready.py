"""A response whose bytes are ready: one write of head and body, and the wait until the kernel has taken them.

aiohttp's own Response builds headers that nobody asked for (date, server) and costs a tenth of a small call.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

_BEGUN = web.RequestKey("begun", bool)
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"


class ReadyResponse(web.StreamResponse):
    """Sent by `prepare`, which raises ConnectionResetError when the agent is gone."""

    def __init__(self, head: bytes, body: bytes) -> None:
        super().__init__()
        self._head = head
        self._ready = body
        self._stays = True
        self._sent = False

    @property
    def keep_alive(self) -> bool:
        return self._stays

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if self._sent:
            return None
        self._sent = True
        self._stays = request.keep_alive
        connection = b""
        if not self._stays:
            connection = b"Connection: close\r\n"
        elif request.version < HttpVersion11:
            connection = b"Connection: keep-alive\r\n"
        transport = begin(request)
        transport.write(b"%sContent-Length: %d\r\n%s\r\n%s" % (self._head, len(self._ready), connection, self._ready))
        await request.writer.drain()
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Everything was sent by `prepare`."""


def begin(request: web.BaseRequest) -> asyncio.Transport:
    """The request's transport, about to be written to; set so that a drain waits until the kernel has taken everything:
    what was written counts as delivered. ConnectionResetError when the agent is gone."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the agent went away")
    transport.set_write_buffer_limits(high=0)
    request[_BEGUN] = True
    return transport


def begun(request: web.BaseRequest) -> bool:
    """Something of the reply may have reached the agent: it cannot get another."""
    return _BEGUN in request
