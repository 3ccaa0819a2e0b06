"""GET /health of a worker: a launcher is there, and the queue answers.

Agents reach it too, over loopback, and could have a whole HTTP server take all memory that the worker may: hence one of
its own, which bounds what it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kitestring_api import names
from kitestring_rollout.worker.config import Listener

CONNECTIONS = 16
"""At once. A further one takes the place of the oldest: whoever asks honestly is answered before that."""
REQUEST_BYTES = 4096
REQUEST_SECONDS = 5.0


@asynccontextmanager
async def served(listener: Listener, state: Callable[[], dict[str, bool]]) -> AsyncIterator[str]:
    """Serves 200 where all of the state is true, else 503, with the state; gives the URL. OSError: cannot bind."""
    connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= CONNECTIONS:
            oldest = next(iter(connections))
            del connections[oldest]
            oldest.transport.abort()
        connections[writer] = asyncio.current_task()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_answer(request, state()))
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError):  # a TimeoutError and a half request are among them
            writer.transport.abort()
        finally:
            connections.pop(writer, None)

    server = await asyncio.start_server(connected, listener.host, listener.port, limit=REQUEST_BYTES)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()
        await asyncio.gather(*(task for task in connections.values() if task is not None))


def _answer(request: bytes, state: dict[str, bool]) -> bytes:
    """The whole reply to the head of a request."""
    body = json.dumps(state).encode()
    status = "200 OK" if all(state.values()) else "503 Service Unavailable"
    if not request.startswith(f"GET {names.ROUTE_HEALTH} ".encode()):
        status, body = "404 Not Found", b"{}"
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode() + b"\r\n\r\n" + body
