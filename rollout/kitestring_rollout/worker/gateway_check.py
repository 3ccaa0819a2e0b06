"""Whether a gateway can be reached from where agents run: asked from beside them, over the same network and DNS."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import time
from dataclasses import dataclass

import aiohttp
from yarl import URL

from kitestring_api import names

CHECK_SECONDS = 5.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
WAIT_SECONDS = 30.0
"""How long a new pod may be without its way to a gateway: a network plugin needs moments to learn of a pod."""

LOOK_SECONDS = 2.0
"""A gateway is looked up at most so often: rollouts begin far more often than gateways are replaced."""


PORTS_SECONDS = 75.0
"""How long for a port of our own: those that an agent has used up are free again after 60 s (TIME_WAIT)."""
SHORTAGES = frozenset({errno.EADDRNOTAVAIL, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What a connection fails of on this side. Agents beside the worker can bring it about: it says nothing of the gateway,
and excuses nobody."""


ANYWHERE = ("192.0.2.1", 53)
"""For documentation (RFC 5737): nothing is sent there."""


@dataclass(frozen=True, slots=True)
class _Unreached:
    why: str
    is_shortage: bool


async def _unreached(base_url: str) -> _Unreached | None:
    """Why no gateway answers at an attempt's base URL; None when one does, whatever it says.

    The name is looked up and the connection made anew, as an agent's would be.
    """
    url = URL(base_url).origin()
    connector = aiohttp.TCPConnector(force_close=True, use_dns_cache=False)
    limit = aiohttp.ClientTimeout(total=CHECK_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limit) as session,
            session.get(url.with_path(names.ROUTE_HEALTH)),
        ):
            return None
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is one
        why = f"{url} cannot be reached from the agent's side: {type(error).__name__} {error}".strip()
        return _Unreached(why, _is_shortage(error))


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return not _may_ask()
    return isinstance(error, OSError) and error.errno in SHORTAGES


def _may_ask() -> bool:
    """Whether there is a port from which a name could be looked up: a lookup that fails does not say so."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(ANYWHERE)
    except OSError as error:
        return error.errno not in SHORTAGES
    return True


@dataclass(frozen=True, slots=True)
class _Proof:
    addresses: frozenset[str]
    """Where it answered."""
    looked_at: float
    """When its name still had these, by the monotonic clock."""


class ProvenGateways:
    """The gateways to which the way is open: they answered once in the life of this process, where they still are."""

    def __init__(self) -> None:
        self._proven: dict[URL, _Proof] = {}

    async def prove(self, base_url: str) -> str | None:
        """Waits until the gateway of a base URL has answered; why it did not in WAIT_SECONDS (PORTS_SECONDS).

        One that has is looked up again after LOOK_SECONDS: under another address it is another pod, of which the
        network has still to learn.
        """
        origin = URL(base_url).origin()
        proof = self._proven.get(origin)
        if proof is not None and time.monotonic() - proof.looked_at < LOOK_SECONDS:
            return None
        begun, pause = time.monotonic(), FIRST_PAUSE
        addresses = await _addresses(origin)
        is_open = proof is not None and proof.addresses == addresses
        while not is_open:
            unreached = await _unreached(base_url)
            if unreached is not None:
                wait = PORTS_SECONDS if unreached.is_shortage else WAIT_SECONDS
                if time.monotonic() + pause > begun + wait:
                    self._proven.pop(origin, None)
                    return unreached.why
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 (spreads the workers)
                pause = min(2 * pause, LONGEST_PAUSE)
                addresses = await _addresses(origin)
            is_open = unreached is None
        self._proven[origin] = _Proof(addresses, time.monotonic())
        return None

    async def cut_off(self, base_url: str) -> str | None:
        """Why no gateway answers there, if that is not our own shortage. One that does not is to be proven again."""
        unreached = await _unreached(base_url)
        if unreached is None:
            return None
        self._proven.pop(URL(base_url).origin(), None)
        return None if unreached.is_shortage else unreached.why


async def _addresses(origin: URL) -> frozenset[str]:
    """Of the host of a URL; none where it has none, or nobody says so: then the connection says why."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except OSError:  # a TimeoutError is one
        return frozenset()
    return frozenset(str(address[0]) for *_, address in found)
