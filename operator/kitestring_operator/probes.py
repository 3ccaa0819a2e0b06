"""Health and metrics over HTTP: red means that a new process would do better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from kitestring_api import names
from kitestring_operator.metrics import Metrics

Check = Callable[[], str | None]
"""What is wrong; None: nothing."""

LIVE_ROUTES: Final = ("/healthz", "/livez")
READY_ROUTE: Final = "/readyz"


class Probes:
    """The HTTP server of the operator. Answering at all shows that the event loop turns."""

    def __init__(self, metrics: Metrics, *, alive: Check, ready: Check) -> None:
        self._metrics = metrics
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve; the port that was bound."""
        app = web.Application()
        for route in LIVE_ROUTES:
            app.router.add_get(route, self._answer_alive)
        app.router.add_get(READY_ROUTE, self._answer_ready)
        app.router.add_get(names.ROUTE_METRICS, self._answer_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer_alive(self, _: web.Request) -> web.Response:
        return _answer(self._alive())

    async def _answer_ready(self, _: web.Request) -> web.Response:
        return _answer(self._ready())

    async def _answer_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(problem: str | None) -> web.Response:
    return web.Response(text="ok\n") if problem is None else web.Response(text=f"{problem}\n", status=503)
