"""The one door of a worker that agents reach: what they may make it hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from kitestring_rollout.worker import health
from kitestring_rollout.worker.config import Listener
from kitestring_rollout.worker.health import CONNECTIONS, REQUEST_BYTES, served

GOOD = {"launcher": True, "queue": True}
ASK = b"GET /health HTTP/1.1\r\nHost: worker\r\n\r\n"


@pytest.fixture
async def state() -> dict[str, bool]:
    return dict(GOOD)


@pytest.fixture
async def port(state: dict[str, bool]) -> AsyncIterator[int]:
    async with served(Listener(), lambda: state) as url:
        assert url.startswith("http://127.0.0.1:")
        yield int(url.rpartition(":")[2])


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def at(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def said(self, data: bytes = b"") -> bytes:
        """All that comes until the other side closes; nothing where it breaks off."""
        self.writer.write(data)
        try:
            async with asyncio.timeout(10):
                return await self.reader.read()
        except ConnectionError:
            return b""

    async def aclose(self) -> None:
        self.writer.close()


async def ask(port: int, data: bytes) -> bytes:
    async with aclosing(await Client.at(port)) as client:
        return await client.said(data)


async def test_what_it_says(port: int, state: dict[str, bool]) -> None:
    head, _, body = (await ask(port, ASK)).partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 200 OK"
    assert json.loads(body) == GOOD
    state["queue"] = False
    head, _, body = (await ask(port, ASK)).partition(b"\r\n\r\n")
    assert head.splitlines()[0] == b"HTTP/1.1 503 Service Unavailable"
    assert json.loads(body) == state


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1", b"POST /health HTTP/1.1", b"GET", b"\0"])
async def test_nothing_else_is_there(port: int, line: bytes) -> None:
    assert (await ask(port, line + b"\r\n\r\n")).startswith(b"HTTP/1.1 404 Not Found\r\n")


async def test_a_request_that_is_too_long_is_not_kept(port: int) -> None:
    header = b"X-%d: " + b"x" * (REQUEST_BYTES // 4) + b"\r\n"
    assert await ask(port, ASK[:-2] + b"".join(header % number for number in range(128))) == b""
    assert (await ask(port, ASK)).startswith(b"HTTP/1.1 200")


async def test_one_that_says_nothing_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REQUEST_SECONDS", 0.05)
    assert await ask(port, b"GET /health HTTP/1.1\r\n") == b""


async def test_many_connections_take_the_place_of_each_other(port: int) -> None:
    idle = [await Client.at(port) for _ in range(CONNECTIONS)]
    for _ in range(3):
        assert (await ask(port, ASK)).startswith(b"HTTP/1.1 200")
    further = [await Client.at(port) for _ in range(CONNECTIONS)]
    for client in idle:
        assert await client.said() == b""
    assert (await ask(port, ASK)).startswith(b"HTTP/1.1 200")
    for client in [*idle, *further]:
        await client.aclose()


async def test_its_end_waits_for_nobody() -> None:
    async with served(Listener(), lambda: GOOD) as url:
        clients = [await Client.at(int(url.rpartition(":")[2])) for _ in range(3)]
        assert (await ask(int(url.rpartition(":")[2]), ASK)).startswith(b"HTTP/1.1 200")
    for client in clients:
        assert await client.said() == b""
        await client.aclose()
