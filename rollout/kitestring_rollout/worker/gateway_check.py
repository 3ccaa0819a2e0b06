"""Whether an agent that failed could have reached its gateway: asked from beside it, over the same network and DNS."""

from __future__ import annotations

import aiohttp
from yarl import URL

from kitestring_api import names

CHECK_SECONDS = 5.0


async def cut_off(base_url: str) -> str | None:
    """Why no gateway answers at an attempt's base URL; None when one does, whatever it says.

    The name is looked up and the connection made anew, as an agent's would be.
    """
    url = URL(base_url).origin().with_path(names.ROUTE_HEALTH)
    connector = aiohttp.TCPConnector(force_close=True, use_dns_cache=False)
    limit = aiohttp.ClientTimeout(total=CHECK_SECONDS)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session, session.get(url):
            return None
    except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is one
        return f"{url.host} cannot be reached from the agent's side: {type(error).__name__} {error}".strip()
