"""A load generator that costs little beside what it loads: raw connections, ready-made requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit


@dataclass
class Result:
    """Of one round."""

    calls: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds from request to the end of the reply."""
    first: list[float] = field(default_factory=list)
    """Seconds from request to the reply's first data event."""
    events: int = 0
    cpu_seconds: float = 0.0
    """Of the process that was loaded."""

    @property
    def cpu_per_call(self) -> float:
        return self.cpu_seconds / self.calls

    @property
    def rate(self) -> float:
        return self.calls / self.seconds

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Connection(asyncio.Protocol):
    """One request at a time; raises on any status but 200."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._missing: int | None = None
        """Bytes of the body still to come; -1 in a chunked reply, None before the head."""
        self._tail = b""
        self.first_event: float | None = None
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the connection was closed"))

    async def call(self, request: bytes) -> None:
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._missing, self._tail, self.first_event, self.events = b"", None, b"", None, 0
        self._transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        assert self._done is not None
        if self._missing is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._done.set_exception(RuntimeError((head + b"\r\n\r\n" + data)[:2000].decode()))
                return
            lower = head.lower()
            at = lower.find(b"content-length:")
            self._missing = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
        if self._missing >= 0:
            self._missing -= len(data)
            if self._missing == 0 and not self._done.done():
                self._done.set_result(None)
            return
        count = data.count(b"data: ")
        if count:
            self.events += count
            if self.first_event is None:
                self.first_event = time.perf_counter()
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n" and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def request(url: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def load(requests: list[bytes], url: str, seconds: float, rate: float | None = None) -> Result:
    """One connection per request, each repeating it for `seconds`; with `rate`, so many calls a second in all."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    host, port = parts.hostname or "", parts.port or 80
    connections = [(await loop.create_connection(Connection, host, port))[1] for _ in requests]
    result = Result()
    start = time.perf_counter()
    end = start + seconds

    async def repeat(index: int, connection: Connection, payload: bytes) -> None:
        turn = index
        while True:
            now = time.perf_counter()
            if rate is not None:
                due = start + turn / rate
                turn += len(requests)
                if due > now:
                    await asyncio.sleep(due - now)
                now = time.perf_counter()
            if now >= end:
                return
            await connection.call(payload)
            result.latencies.append(time.perf_counter() - now)
            if connection.first_event is not None:
                result.first.append(connection.first_event - now)
            result.events += connection.events
            result.calls += 1

    try:
        await asyncio.gather(*(repeat(i, c, p) for i, (c, p) in enumerate(zip(connections, requests, strict=True))))
        result.seconds = time.perf_counter() - start
    finally:
        for connection in connections:
            connection.close()
    return result
