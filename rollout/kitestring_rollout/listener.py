"""An HTTP port that strangers reach: connections bounded in number, in what each may hold, and in how long it may wait.

aiohttp bounds none of this together: without it, whoever reaches the port takes the process's memory or its
descriptors with connections that send half a request's head, or nothing. How long a reply takes is no matter of this:
the parts bound that themselves.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, cast

from aiohttp import web

_log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 5.0
OPEN_FILES: Final = 65_536
"""Descriptors that a process asks for, where its hard limit leaves so many: some programs that it starts close each
possible one in turn."""
RESERVED_FILES: Final = 256
"""Descriptors that are not for connections."""
MAX_HEADERS: Final = 64
MAX_FIELD_BYTES: Final = 8190
"""W3C's `baggage` may have 8 KiB."""
LINGERING_SECONDS: Final = 2.0
"""For the rest of a body after its answer, so that a client that is still sending reads the answer."""
PIPELINED: Final = 4
"""Requests that may wait behind the one that is served: clients send one at a time, or the next one a little early."""
TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

CROWDED: Final = "crowded"
REFUSED: Final = "refused"
HEAD_TOO_LARGE: Final = "head_too_large"
HEAD_TOO_SLOW: Final = "head_too_slow"
BODY_STOPPED: Final = "body_stopped"
REPLY_NOT_READ: Final = "reply_not_read"
PIPELINING: Final = "pipelining"
REASONS: Final = (CROWDED, REFUSED, HEAD_TOO_LARGE, HEAD_TOO_SLOW, BODY_STOPPED, REPLY_NOT_READ, PIPELINING)
"""Why a connection was closed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one port. Times in seconds."""

    waiting: int = 8192
    """Connections that may be idle, or in a request's head, at once; the ones that have waited longest make room."""
    head_bytes: int = 16_384
    """Of a request's line and headers together; what Node's servers take, so that clients keep to it."""
    head_seconds: float = 30.0
    """From a head's first byte to its last."""
    keepalive_seconds: float = 3630.0
    """Until an idle connection is closed: longer than proxies keep one (an hour), since a request that meets the close
    is lost. How many may be idle is bounded anyway."""
    body_seconds: float = 60.0
    """Without a byte of a body that is not complete."""
    reply_seconds: float = 300.0
    """Without a byte read of a reply that waits to be sent."""


@dataclass(frozen=True, slots=True)
class Waits:
    """How long a connection has waited for its client, in seconds; 0: not at all."""

    head: float = 0.0
    body: float = 0.0
    reply: float = 0.0


def overdue(waits: Waits, limits: Limits) -> str | None:
    """Why the connection is to be closed, if it is."""
    if waits.head > limits.head_seconds:
        return HEAD_TOO_SLOW
    if waits.body > limits.body_seconds:
        return BODY_STOPPED
    if waits.reply > limits.reply_seconds:
        return REPLY_NOT_READ
    return None


def room(limits: Limits, open_files: int) -> tuple[int, int]:
    """Connections that may be open, and that may wait, in a process that may have `open_files` descriptors: a call has
    one to the model server besides its own."""
    most = max((open_files - RESERVED_FILES) // 2, 16)
    return most, min(limits.waiting, most // 2)


def raise_open_files() -> int:
    """Asks for as many descriptors as the hard limit, or OPEN_FILES, allows; how many there may be now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


class Listener:
    """A port of an application or server; `start` sets its runner up and `close` ends it."""

    def __init__(
        self,
        runner: web.BaseRunner,
        limits: Limits | None = None,
        *,
        auto_decompress: bool = True,
        closed: Callable[[str], None] | None = None,
    ) -> None:
        """`closed` is told why, of REASONS, for each connection that is closed."""
        self._runner = runner
        self._limits = limits or Limits()
        self._auto_decompress = auto_decompress
        self._closed = closed
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._door: _Door | None = None

    def __len__(self) -> int:
        """Connections that are open."""
        return 0 if self._door is None else len(self._door.connections)

    async def start(self, host: str, port: int, backlog: int = 1024) -> tuple[str, int]:
        """The address it listens on; OSError when there is none to be had."""
        await self._runner.setup()
        handlers = self._runner.server
        assert handlers is not None
        loop = asyncio.get_running_loop()
        most, waiting = room(self._limits, raise_open_files())
        door = self._door = _Door(self._limits, most, waiting, self._closed)
        self._server = await loop.create_server(
            lambda: _Connection(handlers, door, loop, auto_decompress=self._auto_decompress),
            host,
            port,
            backlog=backlog,
        )
        self._sweep()
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SWEEP_SECONDS, self._sweep)
        assert self._door is not None
        self._door.sweep(loop.time())


class _Door:
    """Who may come in, and who has to leave."""

    def __init__(self, limits: Limits, most: int, waiting: int, closed: Callable[[str], None] | None) -> None:
        self.limits = limits
        self.connections: dict[_Connection, None] = {}
        self._most = most
        self._waiting = waiting
        self._batch = max(waiting // 8, 1)
        self._look_in = self._batch
        """Connections that may come in before the next look at all of them: one look for each would be long."""
        self._closed = closed
        self._counts: Counter[str] = Counter()

    def admit(self, connection: _Connection) -> bool:
        self.connections[connection] = None
        self._look_in -= 1
        is_full = len(self.connections) > self._most
        if is_full or (self._look_in <= 0 and len(self.connections) > self._waiting):
            self._look_in = self._batch
            self._make_room()
        if len(self.connections) <= self._most:
            return True
        del self.connections[connection]
        self.count(REFUSED)
        return False

    def forget(self, connection: _Connection) -> None:
        self.connections.pop(connection, None)

    def count(self, reason: str) -> None:
        self._counts[reason] += 1
        if self._closed is not None:
            self._closed(reason)

    def sweep(self, now: float) -> None:
        for connection in tuple(self.connections):
            reason = overdue(connection.waits(now), self.limits)
            if reason is not None:
                connection.end(reason)
        self._make_room()
        if self._counts:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self._counts.items()))
            _log.warning("connections closed: %s (%d are open)", counts, len(self.connections))
            self._counts.clear()

    def _make_room(self) -> None:
        """Closes connections that wait, when too many do. Clients open another when they need it."""
        waiting = [connection for connection in self.connections if connection.is_waiting]
        surplus = len(waiting) - self._waiting
        if surplus <= 0 and len(self.connections) <= self._most:
            return
        waiting.sort(key=lambda connection: connection.idle_until, reverse=True)
        hosts = [connection.host for connection in waiting]
        for index in crowding(hosts, max(surplus, 0) + self._batch):
            waiting[index].end(CROWDED)


def crowding(hosts: Sequence[str], count: int) -> list[int]:
    """Which `count` of the connections that wait make room, given their addresses, newest first: those of the addresses
    that have most, and of an address those that have waited longest."""
    seen: Counter[str] = Counter()
    ranks = []
    for index, host in enumerate(hosts):
        seen[host] += 1
        ranks.append((seen[host], index))
    return [index for _, index in nlargest(count, ranks)]


class _Connection(web.RequestHandler):
    """One connection. What it reads of aiohttp's state is private there: the tests of this module notice a change."""

    __slots__ = (
        "_door",
        "_head_bytes",
        "_head_since",
        "_link",
        "_pieces",
        "_quiet",
        "_quiet_since",
    )

    def __init__(
        self, handlers: web.Server, door: _Door, loop: asyncio.AbstractEventLoop, *, auto_decompress: bool
    ) -> None:
        super().__init__(
            handlers,
            loop=loop,
            keepalive_timeout=door.limits.keepalive_seconds,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way to say none
            max_line_size=door.limits.head_bytes,
            max_headers=MAX_HEADERS,
            max_field_size=MAX_FIELD_BYTES,
            lingering_time=LINGERING_SECONDS,
            auto_decompress=auto_decompress,
        )
        self._door = door
        self._link: asyncio.Transport | None = None
        """aiohttp drops its own reference before the last byte is sent."""
        self._head_bytes = 0
        """Of a head that is not complete."""
        self._head_since = 0.0
        self._pieces = 0
        """Received so far."""
        self._quiet = (0, 0)
        """Pieces received and bytes to be sent as a sweep found them last, and since when they are the same."""
        self._quiet_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._link = cast(asyncio.Transport, transport)
        if self._door.admit(self):
            super().connection_made(transport)
        else:
            self._link.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pieces += 1
        request = self._current_request
        is_next = request is not None and request.content.is_eof()  # nothing of the body that is read is left to come
        super().data_received(data)
        if self._messages:
            self._head_bytes = 0
            if len(data) > self._door.limits.head_bytes or len(self._messages) > 1:
                self._look_at_heads()
        # The first head may begin to come before it is waited for.
        elif is_next or self._waiter is not None or not self._request_count:
            self._in_a_head(len(data))

    def _in_a_head(self, size: int) -> None:
        if not self._head_bytes:
            self._head_since = self._loop.time()
        self._head_bytes += size
        if self._head_bytes > self._door.limits.head_bytes:
            self._refuse_head()

    def _look_at_heads(self) -> None:
        if len(self._messages) > PIPELINED:
            self.end(PIPELINING)
            return
        for message, _ in self._messages:
            headers = getattr(message, "raw_headers", ())  # an error of the parser has none
            if sum(len(name) + len(value) for name, value in headers) > self._door.limits.head_bytes:
                self._refuse_head()
                return

    def _refuse_head(self) -> None:
        if self._current_request is None and self._link is not None:
            self._link.write(TOO_LARGE)
        self.end(HEAD_TOO_LARGE, abort=False)

    @property
    def is_waiting(self) -> bool:
        """For a request, or for the rest of its head."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def idle_until(self) -> float:
        """When its keepalive ends: the order in which connections have come to wait."""
        return self._next_keepalive_close_time

    @property
    def host(self) -> str:
        peer = self.peername
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def waits(self, now: float) -> Waits:
        """What it waits for, as far as sweeps can tell."""
        unsent = 0 if self._link is None else self._link.get_write_buffer_size()
        quiet = (self._pieces, unsent)
        if quiet != self._quiet:
            self._quiet, self._quiet_since = quiet, now
        request = self._current_request
        in_body = request is not None and not request.content.is_eof() and not self._reading_paused
        return Waits(
            head=now - self._head_since if self._head_bytes and self.is_waiting else 0.0,
            body=now - self._quiet_since if in_body else 0.0,
            reply=now - self._quiet_since if unsent else 0.0,
        )

    def end(self, reason: str, *, abort: bool = True) -> None:
        """Closes it; with `abort` at once, without what is still to be sent."""
        self._door.count(reason)
        self.force_close()
        if abort and self._link is not None:
            self._door.forget(self)
            self._link.abort()
