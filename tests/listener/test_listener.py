"""What strangers cannot do to a port, and what clients still can."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field

import pytest
import uvloop
from aiohttp import web

from kitestring_rollout import listener as module
from kitestring_rollout.listener import (
    BODY_STOPPED,
    CROWDED,
    HEAD_TOO_LARGE,
    HEAD_TOO_SLOW,
    PIPELINING,
    REFUSED,
    REPLY_NOT_READ,
    Limits,
    Listener,
    Waits,
    crowding,
    overdue,
    room,
)

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
MEGABYTES = bytes(32 << 20)
MOMENT = 0.05


@dataclass
class Port:
    """A server whose handlers a test holds, and what became of its connections."""

    listener: Listener
    address: tuple[str, int] = ("", 0)
    closed: list[str] = field(default_factory=list)
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """A request has begun to be served."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.served.set()
        if request.path == "/held":
            await self.go_on.wait()
        if request.path == "/large":
            return web.Response(body=MEGABYTES)
        if request.path == "/stream":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"first")
            await self.go_on.wait()
            await response.write(b"last")
            return response
        return web.Response(body=str(len(await request.read())).encode())

    async def connect(self, sent: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def until(self, count: int) -> None:
        """Only so many connections are open."""
        async with asyncio.timeout(5):
            while len(self.listener) != count:  # noqa: ASYNC110
                await asyncio.sleep(0)


Run = Callable[[Coroutine[None, None, None]], None]
Open = Callable[..., contextlib.AbstractAsyncContextManager[Port]]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """For what depends on the loop's transports: the parts run on uvloop."""
    runner: Run = request.param
    return runner


@pytest.fixture
def open_port(monkeypatch: pytest.MonkeyPatch) -> Open:
    """`async with open_port(Limits(…)) as port`; sweeps come quickly."""
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.01)

    @contextlib.asynccontextmanager
    async def opened(limits: Limits | None = None) -> AsyncIterator[Port]:
        port: Port

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await port.handle(request)

        closed: list[str] = []
        runner = web.ServerRunner(web.Server(handle, handler_cancellation=True), shutdown_timeout=1.0)
        listener = Listener(runner, limits, closed=closed.append)
        port = Port(listener, closed=closed)
        port.address = await listener.start("127.0.0.1", 0)
        try:
            yield port
        finally:
            await listener.close()

    return opened


async def answer(client: Client) -> tuple[int, bytes]:
    reader, _ = client
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    size = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return int(head.split()[1]), await reader.readexactly(size)


async def ended(client: Client) -> bytes:
    """What came until the server closed the connection."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.wait_for(client[0].read(1 << 20), 5):
            got += piece
    client[1].close()
    return got


def head(size: int, field: int = 4000) -> bytes:
    """A head of about `size` bytes, without its end."""
    lines = [b"X-%d: %s\r\n" % (number, b"a" * field) for number in range(size // field)]
    return b"POST / HTTP/1.1\r\nHost: here\r\n" + b"".join(lines)


def test_a_head_that_never_ends_is_refused_as_soon_as_it_is_too_large(open_port: Open, run: Run) -> None:
    async def scenario() -> None:
        async with open_port() as port:
            client = await port.connect(head(8000))
            for number in range(10):
                client[1].write(b"Y-%d: %s\r\n" % (number, b"a" * 1000))
                if port.closed:
                    break
                await asyncio.sleep(0)
            assert (await ended(client)).startswith(b"HTTP/1.1 431 ")
            assert port.closed == [HEAD_TOO_LARGE]

    run(scenario())


def test_a_head_is_counted_from_the_first_byte(open_port: Open, run: Run) -> None:
    """Which may be there before the server has begun to wait for it."""

    async def scenario() -> None:
        async with open_port() as port:
            for _ in range(20):
                with socket.create_connection(port.address) as stranger:  # while the loop stands still
                    stranger.sendall(head(20_000))
                    stranger.setblocking(False)
                    got = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(stranger, 4096), 5)
                    assert got.startswith(b"HTTP/1.1 431 ")

    run(scenario())


async def test_a_large_head_in_one_piece_is_refused_too(open_port: Open) -> None:
    async with open_port() as port:
        whole = await port.connect(head(60_000) + b"\r\n")
        assert b" 431 " in await ended(whole)
        assert not port.served.is_set()


async def test_a_head_of_the_size_that_clients_send_is_served_however_it_is_cut(open_port: Open) -> None:
    request = head(12_000) + b"Content-Length: 5\r\n\r\nhello"
    async with open_port() as port:
        client = await port.connect()
        for start in range(0, len(request), 1000):
            client[1].write(request[start : start + 1000])
            await client[1].drain()
            await asyncio.sleep(0)
        assert await answer(client) == (200, b"5")
        client[1].write(request)
        assert await answer(client) == (200, b"5")
        client[1].close()
        assert port.closed == []


@pytest.mark.parametrize("size", [17_000, 70_000, 900_000])
async def test_a_large_body_is_no_head(open_port: Open, size: int) -> None:
    async with open_port() as port:
        client = await port.connect()
        for _ in range(3):
            client[1].write(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(0, size, 100_000):
                client[1].write(bytes(min(100_000, size)))
                await client[1].drain()
                await asyncio.sleep(0)
            assert await answer(client) == (200, b"%d" % size)
        client[1].close()
        assert port.closed == []


async def test_a_head_has_a_deadline_that_dripping_does_not_move(open_port: Open) -> None:
    async with open_port(Limits(head_seconds=MOMENT)) as port:
        _, writer = client = await port.connect(b"GET / HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"X-Y: z\r\n")
                await asyncio.sleep(MOMENT / 10)

        dripping = asyncio.create_task(drip())
        await ended(client)
        dripping.cancel()
        assert port.closed == [HEAD_TOO_SLOW]


async def test_an_idle_connection_is_closed_whether_it_was_used_or_not(open_port: Open) -> None:
    async with open_port(Limits(keepalive_seconds=MOMENT)) as port:
        fresh, used = await port.connect(), await port.connect(GET)
        assert await answer(used) == (200, b"0")
        assert await ended(fresh) == await ended(used) == b""


async def test_a_body_that_stops_coming_ends_its_request(open_port: Open) -> None:
    async with open_port(Limits(body_seconds=MOMENT)) as port:
        client = await port.connect(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\nhello")
        assert await ended(client) == b""
        assert port.closed == [BODY_STOPPED]


def test_a_reply_that_nobody_reads_is_given_up(open_port: Open, run: Run) -> None:
    async def scenario() -> None:
        async with open_port(Limits(reply_seconds=MOMENT)) as port:
            _, writer = await port.connect(b"GET /large HTTP/1.1\r\nHost: here\r\n\r\n")
            await port.until(1)
            await port.until(0)
            writer.close()
            assert port.closed == [REPLY_NOT_READ]

    run(scenario())


@pytest.mark.parametrize("path", ["/held", "/stream"])
async def test_what_is_being_served_lives_on_without_a_byte(open_port: Open, path: str) -> None:
    limits = Limits(waiting=1, head_seconds=MOMENT, keepalive_seconds=MOMENT, body_seconds=MOMENT, reply_seconds=MOMENT)
    async with open_port(limits) as port:
        client = await port.connect(f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\nhi".encode())
        await port.served.wait()
        idle = await port.connect()
        await ended(idle)  # every bound has passed
        port.go_on.set()
        if path == "/held":
            assert await answer(client) == (200, b"2")
        else:
            got = b""
            while b"last" not in got:
                got += await asyncio.wait_for(client[0].read(1 << 16), 5)
        client[1].close()
        assert port.closed == []


def test_of_too_many_that_wait_the_oldest_make_room(open_port: Open, run: Run) -> None:
    async def scenario() -> None:
        async with open_port(Limits(waiting=16)) as port:
            held = await port.connect(b"GET /held HTTP/1.1\r\nHost: here\r\n\r\n")
            await port.served.wait()
            idle = [await port.connect() for _ in range(40)]
            for client in idle[:16]:
                await ended(client)
            newest = idle[-1]
            newest[1].write(GET)
            assert await answer(newest) == (200, b"0")
            port.go_on.set()
            assert await answer(held) == (200, b"0")
            assert set(port.closed) == {CROWDED}
            assert len(port.listener) <= 16 + 2 + 1
            for client in [held, *idle[16:]]:
                client[1].close()

    run(scenario())


async def test_beyond_what_descriptors_allow_a_connection_is_refused(
    open_port: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "raise_open_files", lambda: 0)  # room for 16
    async with open_port() as port:
        held = [await port.connect(b"GET /held HTTP/1.1\r\nHost: here\r\n\r\n") for _ in range(16)]
        await port.until(16)
        assert await ended(await port.connect(GET)) == b""
        assert port.closed[-1] == REFUSED
        port.go_on.set()
        for client in held:
            assert await answer(client) == (200, b"0")
            client[1].close()


@pytest.mark.parametrize(
    ("behind", "reason"), [(GET * 20, PIPELINING), (head(60_000), HEAD_TOO_LARGE)], ids=["requests", "a head"]
)
async def test_what_queues_behind_a_held_request_is_bounded(open_port: Open, behind: bytes, reason: str) -> None:
    async with open_port() as port:
        client = await port.connect(b"GET /held HTTP/1.1\r\nHost: here\r\n\r\n")
        await port.served.wait()
        client[1].write(behind)
        await ended(client)
        assert port.closed == [reason]


async def test_the_next_request_may_come_a_little_early(open_port: Open) -> None:
    async with open_port() as port:
        client = await port.connect(b"GET /held HTTP/1.1\r\nHost: here\r\n\r\n")
        await port.served.wait()
        client[1].write(GET)
        port.go_on.set()
        assert [await answer(client) for _ in range(2)] == [(200, b"0")] * 2
        client[1].close()


async def test_a_client_whose_body_ends_while_it_is_answered_reads_all_of_it(open_port: Open) -> None:
    async with open_port() as port:
        client = await port.connect(b"GET /large HTTP/1.1\r\nHost: here\r\nContent-Length: 3\r\n\r\n")
        await port.served.wait()
        client[1].write(b"end")
        assert await answer(client) == (200, MEGABYTES)
        client[1].close()


@pytest.mark.parametrize(
    ("waits", "reason"),
    [
        (Waits(), None),
        (Waits(head=30, body=60, reply=300), None),
        (Waits(head=31), HEAD_TOO_SLOW),
        (Waits(body=61), BODY_STOPPED),
        (Waits(reply=301), REPLY_NOT_READ),
    ],
)
def test_when_a_connection_is_overdue(waits: Waits, reason: str | None) -> None:
    assert overdue(waits, Limits()) == reason


def test_the_address_that_has_most_makes_room_first() -> None:
    hosts = ["honest", "crowd", "crowd", "crowd", "honest", "crowd"]  # newest first
    assert crowding(hosts, 2) == [5, 3]
    assert crowding(hosts, 4) == [5, 3, 4, 2]
    assert sorted(crowding(hosts, 99)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("open_files", "expected"), [(0, (16, 8)), (1024, (384, 192)), (65_536, (32_640, 8192)), (1 << 20, (524_160, 8192))]
)
def test_room_follows_the_descriptors(open_files: int, expected: tuple[int, int]) -> None:
    assert room(Limits(), open_files) == expected


def test_a_process_that_listens_takes_the_descriptors_it_may_have() -> None:
    program = """
import json, resource
from kitestring_rollout.listener import raise_open_files
given = raise_open_files()
print(json.dumps([given, *resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))

    output = subprocess.run([sys.executable, "-c", program], preexec_fn=lower, capture_output=True, check=True).stdout
    assert json.loads(output) == [512, 512, 512]
