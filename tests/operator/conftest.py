"""Hypothesis does not judge how fast the machine is just now: other tests run beside these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from hypothesis import HealthCheck, settings

from bench.operator.api_server import ApiServer, served
from bench.operator.store import Store

settings.register_profile("operator", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("operator")


@pytest.fixture
def delays() -> dict[str, float]:
    """Seconds by which lists of a path are late."""
    return {}


@pytest.fixture
def may() -> Callable[[web.Request], bool]:
    """What is allowed; anything else is forbidden."""
    return lambda request: True


@pytest.fixture
async def server(
    tmp_path: Path, delays: dict[str, float], may: Callable[[web.Request], bool]
) -> AsyncIterator[ApiServer]:
    """An API server in memory; `tmp_path / "kubeconfig"` leads to it."""
    found = ApiServer(Store())

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not may(request):
            answer = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "forbidden"}
            return web.json_response(answer, status=403)
        if "watch" not in request.query:
            await asyncio.sleep(delays.get(request.path, 0.0))
        return await handler(request)

    app = web.Application(middlewares=[guarded])
    app.add_routes(found.routes())
    async with served(app) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
            "users": [{"name": "here", "user": {}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        yield found
        found.stop()
