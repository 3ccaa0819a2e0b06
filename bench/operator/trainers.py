"""The trainers of all runs over HTTP: each says how its run goes; the counters move while they are told to."""

from __future__ import annotations

import itertools

import orjson
from aiohttp import web

from kitestring_api import names


class Trainers:
    """Answers for every trainer at once; whose Service was asked does not matter to what is said."""

    def __init__(self) -> None:
        self.moves = False
        """Whether each answer differs from the last: steps end, rollouts are counted."""
        self.answers = 0
        self._counter = itertools.count(1)
        self._said = 1

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(names.ROUTE_RUN_STATUS, self._status),
            web.put(names.ROUTE_RUN_LIVE, self._live),
        ]

    async def _status(self, _: web.Request) -> web.Response:
        self.answers += 1
        if self.moves:
            self._said = next(self._counter)
        said = self._said
        report = {
            "phase": "RollingOut",
            "step": 1 + said // 2000,
            "steps": 1000,
            "reward": 0.5 + (said % 100) / 1000,
            "tokens": 100 * said,
            "eta_seconds": 3600.0,
            "rollouts": {"running": said % 32, "retried": 3, "classes": {names.CLASS_SUCCEEDED: said}, "excluded": 1},
            "validation": [{"step": 0, "mode": names.MODE_VALIDATION_SAMPLED, "reward": 0.25}],
        }
        return web.Response(body=orjson.dumps(report), content_type="application/json")

    async def _live(self, request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"{}", content_type="application/json")
