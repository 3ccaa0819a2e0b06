"""GET /health of a worker: a launcher is there, and the queue answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from kitestring_api import names
from kitestring_rollout.worker.config import Listener


@asynccontextmanager
async def served(listener: Listener, state: Callable[[], dict[str, bool]]) -> AsyncIterator[str]:
    """Serves 200 where all of the state is true, else 503, with the state; gives the URL. OSError: cannot bind."""

    async def health(_: web.Request) -> web.Response:
        now = state()
        return web.json_response(now, status=200 if all(now.values()) else 503)

    app = web.Application()
    app.router.add_get(names.ROUTE_HEALTH, health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, listener.host, listener.port).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
