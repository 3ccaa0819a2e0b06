"""The sidecar's routes: inference for gateways, weights for the trainer, probes for the kubelet."""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ValidationError

from kitestring_api import names
from kitestring_rollout.policy_sidecar.keeper import Keeper, NotCurrent
from kitestring_rollout.policy_sidecar.passing import Passing
from kitestring_rollout.policy_sidecar.server import LoadFailed, ServerAway, ServerRefused
from kitestring_rollout.policy_sidecar.versions import VersionMissing
from kitestring_rollout.protocol.gateway_admin import ProtocolError
from kitestring_rollout.protocol.policy_sidecar import REASON_WEIGHTS_TORN, LoadedWeights, LoadWeights
from kitestring_rollout.storage import FolderTorn, StoreUnavailable
from kitestring_rollout.storage.published_weights import check_version

_log = logging.getLogger(__name__)

_ANSWERS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (NotCurrent, 409, "NotCurrent"),
    (VersionMissing, 404, "UnknownVersion"),
    (FolderTorn, 422, REASON_WEIGHTS_TORN),
    (ServerRefused, 422, "ServerRefused"),
    (ServerAway, 503, "ServerAway"),
    (LoadFailed, 503, "LoadFailed"),
    (StoreUnavailable, 503, "StoreUnavailable"),
    (OSError, 503, "DiskFailed"),
)


class Sidecar:
    """`application()` gives the routes. There is no way through to any other route of the server."""

    def __init__(self, keeper: Keeper, passing: Passing, credential: str, max_body_bytes: int) -> None:
        self._keeper = keeper
        self._passing = passing
        self._credential = f"Bearer {credential}".encode()
        self._max_body_bytes = max_body_bytes

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_gone])
        app.router.add_post(names.ROUTE_CHAT, self._infer)
        app.router.add_post(names.ROUTE_COMPLETIONS, self._infer)
        app.router.add_get(names.ROUTE_MODELS, self._look)
        app.router.add_get(names.ROUTE_METRICS, self._look)
        app.router.add_get(names.ROUTE_SIDECAR_SERVER_HEALTH, self._server_health)
        app.router.add_get(names.ROUTE_SERVER_INFO, self._weight_info)
        app.router.add_get(names.ROUTE_HEALTH, self._health)
        app.router.add_get(names.ROUTE_SIDECAR_STARTUP, self._startup)
        app.router.add_get(names.ROUTE_READY, self._ready)
        app.router.add_get(names.ROUTE_SIDECAR_WEIGHTS, self._weights)
        app.router.add_post(names.ROUTE_SIDECAR_WEIGHTS, self._take)
        return app

    # --- for gateways ---

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        return await self._passing.infer(request, _route(request))

    async def _look(self, request: web.Request) -> web.StreamResponse:
        return await self._passing.look(request, _route(request))

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._keeper.status().version})

    # --- for the kubelet ---

    async def _health(self, _: web.Request) -> web.Response:
        """Of this process alone: nothing that happens to the server is mended by ending its sidecar."""
        return web.json_response({"status": "ok"})

    async def _server_health(self, request: web.Request) -> web.StreamResponse:
        return await self._passing.look(request, names.ROUTE_HEALTH)

    async def _startup(self, _: web.Request) -> web.Response:
        return _probe(None if self._keeper.linked else "the first weights are not there yet")

    async def _ready(self, _: web.Request) -> web.Response:
        return _probe(self._keeper.problem)

    # --- for the trainer ---

    async def _weights(self, request: web.Request) -> web.Response:
        return self._refusal(request) or _answer(self._keeper.status())

    async def _take(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            body = LoadWeights.model_validate_json(await request.read())
            check_version(body.version)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return _problem(400, "InvalidBody", f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
        except ValueError as error:
            return _problem(400, "InvalidBody", f"version: {error}")
        # Of its own: a trainer that goes away must not leave a server half loaded.
        taking = asyncio.ensure_future(self._keeper.take(body.version))
        taking.add_done_callback(_log_unheard)
        try:
            loaded: LoadedWeights = await asyncio.shield(taking)
        except tuple(kind for kind, _, _ in _ANSWERS) as error:
            status, reason = next((status, reason) for kind, status, reason in _ANSWERS if isinstance(error, kind))
            _log.warning("version %s is not served: %s", body.version, error)
            return _problem(status, reason, str(error))
        return _answer(loaded)

    def _refusal(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, self._credential):
            return None
        return _problem(401, "Unauthorized", "the weights routes need the trainer's credential")


@web.middleware
async def _gone(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError as gone:
        raise asyncio.CancelledError from gone  # aiohttp takes this for what it is: nobody is there to answer


def _route(request: web.Request) -> str:
    """The route as it was declared, never as the client wrote it."""
    resource = request.match_info.route.resource
    assert resource is not None
    return resource.canonical


def _log_unheard(taking: asyncio.Future[LoadedWeights]) -> None:
    if not taking.cancelled() and (error := taking.exception()) is not None:
        _log.debug("a load ended with %r", error)


def _probe(problem: str | None) -> web.Response:
    status = {"status": "ok"} if problem is None else {"status": problem}
    return web.json_response(status, status=200 if problem is None else 503)


def _answer(message: BaseModel) -> web.Response:
    return web.Response(text=message.model_dump_json(), content_type="application/json")


def _problem(status: int, reason: str, error: str) -> web.Response:
    return web.Response(
        status=status, text=ProtocolError(error=error, reason=reason).model_dump_json(), content_type="application/json"
    )
