"""The queue's port, which agents reach too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from kitestring_trainer.queue.thread import QueueSettings, QueueThread
from tests.trainer.world import World


@pytest.fixture
def port(world: World) -> Iterator[tuple[str, int]]:
    config = world.config()

    async def never(*_: object) -> None:
        raise AssertionError

    settings = QueueSettings(
        rules=config.rules,
        host="127.0.0.1",
        port=0,
        credential="secret",
        gateways=config.gateways,
        gateway_credential="secret",
        gateway_gone_seconds=1.0,
        poll_seconds=1.0,
    )
    thread = QueueThread(settings, never, None, lambda: None)  # type: ignore[arg-type, return-value]
    url = urlsplit(thread.start())
    assert url.hostname is not None and url.port is not None
    yield url.hostname, url.port
    thread.close()


def until_closed(connection: socket.socket) -> bytes:
    connection.settimeout(5)
    return b"".join(iter(lambda: connection.recv(4096), b""))


def test_a_head_without_an_end_is_refused(port: tuple[str, int]) -> None:
    with socket.create_connection(port) as connection:
        connection.sendall(b"POST /queue/v1/lease HTTP/1.1\r\nHost: q\r\n" + b"X-Y: %s\r\n" % (b"a" * 6000) * 3)
        assert until_closed(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("path", "status"), [("/queue/v1/wanted", b"401"), ("/health", b"200")])
def test_a_stranger_has_one_request_of_a_connection(port: tuple[str, int], path: str, status: bytes) -> None:
    with socket.create_connection(port) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: q\r\n\r\n".encode() * 2)
        assert until_closed(connection).count(b"HTTP/1.1 " + status) == 1
