"""Which gateways count as reachable, and for how long: one that was replaced under its name is another."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from typing import Any

import pytest
from yarl import URL

from kitestring_rollout.worker import gateway_check
from kitestring_rollout.worker.gateway_check import ProvenGateways
from tests.worker.late_gateway import LateGateway

NAME = "run-gateway-0.run-gateway"
HERE, NOWHERE = "127.0.0.1", "127.0.0.2"


class Names:
    """DNS with one name, which may come to stand for another address."""

    def __init__(self) -> None:
        self.address: str | None = HERE
        self.asked = 0
        self.was_asked = asyncio.Event()

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        assert host == NAME
        self.asked += 1
        self.was_asked.set()
        if self.address is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.address, port))]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(gateway_check, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(gateway_check, "LOOK_SECONDS", 0.0)
    return made


def by_name(gateway: LateGateway) -> str:
    return str(URL(gateway.base_url).with_host(NAME))


async def test_one_that_was_replaced_under_its_name_is_proven_again(names: Names) -> None:
    gateways = ProvenGateways()
    async with LateGateway(cuts=0).open() as gateway:
        for _ in range(3):
            assert await gateways.prove(by_name(gateway)) is None
        assert gateway.connections == 1, "as long as it is the same"
        names.address = NOWHERE
        for _ in range(2):
            why = await gateways.prove(by_name(gateway))
            assert why is not None and "cannot be reached" in why
        names.address = HERE
        assert await gateways.prove(by_name(gateway)) is None
        assert gateway.connections == 2


async def test_one_that_opens_late_is_known_by_where_it_answered(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_check, "WAIT_SECONDS", 30.0)
    names.address = NOWHERE
    gateways = ProvenGateways()
    async with LateGateway(cuts=1).open() as gateway:
        proving = asyncio.create_task(gateways.prove(by_name(gateway)))
        await names.was_asked.wait()
        names.address = HERE
        assert await proving is None
        assert await gateways.prove(by_name(gateway)) is None
        assert gateway.connections == 2


async def test_one_whose_name_is_lost_is_proven_again(names: Names) -> None:
    gateways = ProvenGateways()
    async with LateGateway(cuts=0).open() as gateway:
        assert await gateways.prove(by_name(gateway)) is None
        names.address = None
        assert "cannot be reached" in str(await gateways.prove(by_name(gateway)))


async def test_one_that_does_not_answer_later_is_proven_again(names: Names) -> None:
    gateways = ProvenGateways()
    async with LateGateway(cuts=0).open() as gateway:
        assert await gateways.prove(by_name(gateway)) is None
        names.address = NOWHERE
        assert "cannot be reached" in str(await gateways.cut_off(by_name(gateway)))
        names.address = HERE
        assert await gateways.prove(by_name(gateway)) is None
        assert gateway.connections == 2


class NoPorts:
    """As when an agent has opened and closed more connections than there are ports: they stay taken for a minute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connections: float) -> None:
        self.left = connections
        self._loop = asyncio.get_running_loop()
        self._connect = self._loop.sock_connect
        monkeypatch.setattr(self._loop, "sock_connect", self.connect)

    async def connect(self, sock: socket.socket, address: Any) -> None:
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        await self._connect(sock, address)


async def test_ports_that_an_agent_used_up_excuse_nobody(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    gateways = ProvenGateways()
    async with LateGateway(cuts=0).open() as gateway:
        assert await gateways.prove(by_name(gateway)) is None
        ports = NoPorts(monkeypatch, math.inf)
        assert await gateways.cut_off(by_name(gateway)) is None
        monkeypatch.setattr(gateway_check, "WAIT_SECONDS", 0.0)
        ports.left = 3
        assert await gateways.prove(by_name(gateway)) is None, "the next agent waits for them"
        assert (gateway.connections, ports.left) == (2, 0)
        monkeypatch.setattr(gateway_check, "PORTS_SECONDS", 0.0)
        ports.left = math.inf
        assert await gateways.cut_off(by_name(gateway)) is None
        assert "Cannot assign requested address" in str(await gateways.prove(by_name(gateway)))


class NoPortForNames(socket.socket):
    """As when an agent holds all ports for datagrams."""

    def connect(self, address: Any) -> None:
        if self.type == socket.SOCK_DGRAM:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        super().connect(address)


async def test_a_name_that_cannot_be_asked_for_excuses_nobody(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    gateways = ProvenGateways()
    async with LateGateway(cuts=0).open() as gateway:
        names.address = None
        assert "Temporary failure in name resolution" in str(await gateways.cut_off(by_name(gateway)))
        monkeypatch.setattr(socket, "socket", NoPortForNames)
        assert await gateways.cut_off(by_name(gateway)) is None


async def test_most_rollouts_ask_for_nothing(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_check, "LOOK_SECONDS", 60.0)
    gateways = ProvenGateways()
    async with LateGateway(cuts=0).open() as gateway:
        assert await gateways.prove(by_name(gateway)) is None
        asked = names.asked
        for _ in range(100):
            assert await gateways.prove(by_name(gateway)) is None
        assert (gateway.connections, names.asked) == (1, asked)
