"""Whether a gateway can be reached from where agents run: asked from beside them, over the same network and DNS."""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp
from yarl import URL

from kitestring_api import names

CHECK_SECONDS = 5.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
WAIT_SECONDS = 30.0
"""How long a new pod may be without its way to a gateway: a network plugin needs moments to learn of a pod."""


async def cut_off(base_url: str) -> str | None:
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
        return f"{url} cannot be reached from the agent's side: {type(error).__name__} {error}".strip()


class ProvenGateways:
    """The gateways that answered once in the life of this process: the way to them is open."""

    def __init__(self) -> None:
        self._proven: set[URL] = set()

    async def prove(self, base_url: str) -> str | None:
        """Waits until the gateway of a base URL has answered; why it did not in WAIT_SECONDS."""
        origin = URL(base_url).origin()
        give_up, pause = time.monotonic() + WAIT_SECONDS, FIRST_PAUSE
        while origin not in self._proven:
            why = await cut_off(base_url)
            if why is None:
                self._proven.add(origin)
            elif time.monotonic() + pause > give_up:
                return why
            else:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 (spreads the workers)
                pause = min(2 * pause, LONGEST_PAUSE)
        return None
