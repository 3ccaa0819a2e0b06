"""The agents' side: finds the attempt of a request by its token and hands it to what serves the route."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import orjson
from aiohttp import web
from aiohttp.hdrs import EXPECT

from kitestring_api import names
from kitestring_rollout.gateway.agent_traces import AgentTraces
from kitestring_rollout.gateway.bodies import read
from kitestring_rollout.gateway.calls import Calls
from kitestring_rollout.gateway.errors import JSON_TYPE, Refusal
from kitestring_rollout.gateway.process import Process
from kitestring_rollout.gateway.ready import begin, begun
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.gateway.token import SCOPE_CALLS, SCOPE_REWARDS, SCOPE_SPANS, permit, verify
from kitestring_rollout.traces.records import Api

ATTEMPT_PREFIX: Final = names.ROUTE_ATTEMPT.partition("{")[0]
CALL_ROUTES: Final[dict[str, Api]] = {names.ROUTE_CHAT: "chat", names.ROUTE_COMPLETIONS: "completions"}
PROBES: Final = (names.ROUTE_HEALTH, names.ROUTE_READY)
MAX_REWARD_BYTES: Final = 65_536
SCOPES: Final[dict[tuple[str, str], str]] = {
    ("POST", names.ROUTE_CHAT): SCOPE_CALLS,
    ("POST", names.ROUTE_COMPLETIONS): SCOPE_CALLS,
    ("GET", names.ROUTE_MODELS): SCOPE_CALLS,
    ("POST", names.ROUTE_REWARDS): SCOPE_REWARDS,
    ("POST", names.ROUTE_AGENT_TRACES): SCOPE_SPANS,
}


class Agents:
    """Handler of the agents' listener. There is no router: no other path leads anywhere."""

    def __init__(self, process: Process, calls: Calls, agent_traces: AgentTraces) -> None:
        self._process = process
        self._calls = calls
        self._agent_traces = agent_traces

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        session: Session | None = None
        try:
            token, route = _split(request)
            if route in PROBES and request.method in ("GET", "HEAD"):
                return self._probed(route)
            scope = _scope(request.method, route)
            session = self._session(token, scope)
            permit(session.claims, now=time.time(), epoch=self._process.epoch, scope=scope)
            session.enter(request.task)
            try:
                return await self._serve(request, session, route, scope)
            finally:
                session.leave(request.task)
        except Refusal as refusal:
            error = refusal
        except ConnectionResetError as gone:
            raise asyncio.CancelledError from gone  # aiohttp takes this for what it is: nobody is there to answer
        except asyncio.CancelledError:
            if session is None or session.open or begun(request):
                raise  # the agent went away, or gets no more than it has got
            request.task.uncancel()
            error = Refusal(410, "attempt_closed", "the attempt has been closed")
            error.admitted = True
        self._process.metrics.refused(error.code)
        if session is not None and not error.admitted:
            session.attempt.rejected += 1
        return _last(
            web.Response(body=error.body(), status=error.status, headers={"Content-Type": JSON_TYPE, **error.headers})
        )

    def _probed(self, route: str) -> web.Response:
        if route == names.ROUTE_READY:
            return _last(self._process.readiness())
        return _last(web.Response(body=b'{"status":"ok"}', content_type=JSON_TYPE))

    async def _serve(self, request: web.BaseRequest, session: Session, route: str, scope: str) -> web.StreamResponse:
        if EXPECT in request.headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        api = CALL_ROUTES.get(route)
        if api is not None:
            return await self._calls.serve(request, session, api)
        if scope == SCOPE_REWARDS:
            response = await self._reward(request, session)
        elif scope == SCOPE_SPANS:
            response = await self._agent_traces.serve(request, session)
        else:
            response = self._models(route)
        begin(request)
        await response.prepare(request)  # here, where it counts as in flight until it has been taken
        await response.write_eof()
        return response

    def _session(self, token: str, scope: str) -> Session:
        process = self._process
        session = process.registry.find_token(token)
        if session is None:
            verify(token, process.token_key, now=time.time(), epoch=process.epoch, scope=scope)
            raise Refusal(410, "attempt_closed", "the attempt has been closed")
        return session

    def _models(self, route: str) -> web.StreamResponse:
        process = self._process
        name = route[len(names.ROUTE_MODELS) + 1 :]
        body = process.models.one(name, process.started) if name else process.models.listing(process.started)
        return web.Response(body=body, content_type=JSON_TYPE)

    async def _reward(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        body = await read(request, MAX_REWARD_BYTES)
        session.attempt.check_open()
        reward = session.attempt.rewards.post(body, time.time_ns())
        self._process.metrics.rewards.inc()
        return web.Response(body=orjson.dumps({"value": reward.value, "name": reward.name}), content_type=JSON_TYPE)


def _last(response: web.Response) -> web.Response:
    """Of its connection: what anyone may have is had once, or answers that nobody reads would fill sockets without
    number."""
    response.force_close()
    return response


def _split(request: web.BaseRequest) -> tuple[str, str]:
    """The token, of the path or of a header, and the route below the attempt's base URL."""
    path = request.path
    if path.startswith(ATTEMPT_PREFIX):
        token, slash, rest = path[len(ATTEMPT_PREFIX) :].partition("/")
        return token, slash + rest
    header = request.headers.get("Authorization", "")
    if header[:7].lower() == "bearer ":
        return header[7:].strip(), path
    return request.headers.get("x-api-key", ""), path


def _scope(method: str, route: str) -> str:
    scope = SCOPES.get((method, route))
    if scope is not None:
        return scope
    if method == "GET" and route.startswith(names.ROUTE_MODELS + "/"):
        return SCOPE_CALLS
    allowed = sorted(known for known, path in SCOPES if path == route)
    if allowed:
        raise Refusal(405, "method_not_allowed", f"{route[:64]} takes {', '.join(allowed)}")
    raise Refusal(404, "unknown_route", f"there is no route {route[:128]!r} at the gateway")
