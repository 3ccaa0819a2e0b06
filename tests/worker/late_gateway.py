"""A gateway to which the way opens late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LateGateway:
    """Cuts the first connections as a network does whose rules do not know the pod yet, then answers as a gateway."""

    def __init__(self, cuts: int) -> None:
        self._cuts = cuts
        self.connections = 0
        self.asked = asyncio.Event()
        self.base_url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.asked.set()
        if self.connections > self._cuts:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LateGateway]:
        async with await asyncio.start_server(self.answer, "127.0.0.1", 0) as server:
            self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/r/token"
            yield self
