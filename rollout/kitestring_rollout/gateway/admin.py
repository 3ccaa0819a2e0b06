"""The trainer's side: attempts opened, fenced and ended, policies held and released. Bearer credential."""

from __future__ import annotations

import hmac
import logging
import math
import re
import time
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import BaseModel, ValidationError

from kitestring_api import names
from kitestring_rollout.gateway.attempts import Attempt
from kitestring_rollout.gateway.config import URL_PATTERN
from kitestring_rollout.gateway.metrics import CONTENT_TYPE, Metrics
from kitestring_rollout.gateway.process import Process
from kitestring_rollout.gateway.registry import Closed
from kitestring_rollout.gateway.session import Session, identity_of
from kitestring_rollout.gateway.token import SCOPE_CALLS, SCOPE_REWARDS, SCOPE_SPANS, Claims, sign
from kitestring_rollout.protocol.gateway_admin import (
    EndAttempt,
    HeldAttempts,
    HeldPolicy,
    HoldPolicy,
    OpenAttempt,
    OpenedAttempt,
    PolicyServerList,
    ProtocolError,
    ReleasePolicy,
)
from kitestring_rollout.traces.exporter import SpanLost
from kitestring_rollout.traces.identity import trace_id, traceparent

_log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


class AdminError(Exception):
    """An error answer of the admin routes."""

    def __init__(self, status: int, reason: str, error: str) -> None:
        super().__init__(error)
        self.status = status
        self.reason = reason


def admin_app(process: Process, credential: str) -> web.Application:
    admin = _Admin(process)
    app = web.Application(
        middlewares=[_errors, _authorised(credential, process.metrics)], client_max_size=16 * 1024 * 1024
    )
    app.router.add_get(names.ROUTE_HEALTH, admin.health)
    app.router.add_get(names.ROUTE_READY, admin.ready)
    app.router.add_get(names.ROUTE_METRICS, admin.metrics)
    app.router.add_get(names.ROUTE_ADMIN_STATUS, admin.status)
    app.router.add_get(names.ROUTE_ADMIN_ATTEMPTS, admin.attempts)
    app.router.add_post(names.ROUTE_ADMIN_ATTEMPTS, admin.open)
    app.router.add_post(names.ROUTE_ADMIN_FENCE, admin.fence)
    app.router.add_post(names.ROUTE_ADMIN_END, admin.end)
    app.router.add_post(names.ROUTE_ADMIN_HOLD, admin.hold)
    app.router.add_post(names.ROUTE_ADMIN_RELEASE, admin.release)
    app.router.add_put(names.ROUTE_ADMIN_SERVERS, admin.servers)
    app.router.add_post(names.ROUTE_ADMIN_DRAIN, admin.drain)
    return app


class _Admin:
    def __init__(self, process: Process) -> None:
        self._process = process

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "draining" if self._process.draining else "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        return self._process.readiness()

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._process.metrics_text(), headers={"Content-Type": CONTENT_TYPE})

    async def status(self, request: web.Request) -> web.StreamResponse:
        return _answer(self._process.status())

    async def attempts(self, request: web.Request) -> web.StreamResponse:
        process = self._process
        return _answer(
            HeldAttempts(epoch=process.epoch, attempts=tuple(session.as_held() for session in process.registry))
        )

    async def open(self, request: web.Request) -> web.StreamResponse:
        process = self._process
        body = await _read(request, OpenAttempt)
        session = process.registry.find(body.attempt)
        if session is None:
            if process.registry.closed(body.attempt) is not None:
                raise AdminError(409, "AttemptClosed", f"attempt {body.attempt} has ended")
            if process.draining:
                raise AdminError(503, "Draining", "the gateway is draining and opens no attempts")
            session = self._new_session(body)
        elif session.attempt.opened != body:
            raise AdminError(409, "AttemptDiffers", f"attempt {body.attempt} is open with other values")
        elif not session.open:
            raise AdminError(409, "AttemptClosed", f"attempt {body.attempt} is closed")
        return _answer(
            OpenedAttempt(
                attempt=body.attempt,
                epoch=process.epoch,
                base_url=f"{process.advertised_url}{names.ROUTE_ATTEMPT.format(token=session.token)}",
                token=session.token,
                traceparent=traceparent(body.attempt),
            )
        )

    def _new_session(self, body: OpenAttempt) -> Session:
        process = self._process
        if body.run != process.config.run:
            raise AdminError(400, "WrongRun", f"this gateway serves run {process.config.run!r}, not {body.run!r}")
        try:
            trace_id(body.attempt)
        except ValueError:
            raise AdminError(400, "InvalidBody", f"attempt: {body.attempt!r} is no UUID") from None
        expires = time.time() + body.lifetime_seconds
        scopes = (SCOPE_CALLS, SCOPE_SPANS, *((SCOPE_REWARDS,) if body.reward.accepted else ()))
        claims = Claims(body.run, body.rollout, body.attempt, body.mode, scopes, expires, process.epoch)
        session = Session(
            attempt=Attempt(body, process.epoch, expires),
            identity=identity_of(body, process.epoch),
            token=sign(claims, process.token_key),
            claims=claims,
            exporter=process.exporter,
            record_contents=process.config.record_contents,
            metrics=process.metrics,
            flush=process.recorder.flush,
        )
        process.registry.open(session)
        process.metrics.opened.inc()
        return session

    async def fence(self, request: web.Request) -> web.StreamResponse:
        attempt = request.match_info["attempt"]
        closed = self._process.registry.closed(attempt)
        if closed is not None:
            return _sent(closed.fenced)
        fenced = await self._session(attempt).fence()
        return _answer(fenced)

    async def end(self, request: web.Request) -> web.StreamResponse:
        process = self._process
        attempt = request.match_info["attempt"]
        body = await _read(request, EndAttempt)
        _check_end(body)
        closed = process.registry.closed(attempt)
        if closed is None:
            session = self._session(attempt)
            if not session.fenced:
                raise AdminError(409, "NotFenced", f"attempt {attempt} must be fenced before it is ended")
            fenced = await session.fence()
            if session.ended_with not in (None, body):
                raise AdminError(409, "EndDiffers", f"attempt {attempt} is being ended with other values")
            try:
                ended = await session.end(body)
            except SpanLost as lost:
                raise AdminError(503, "SpanLost", f"the end of attempt {attempt} is not durable: {lost}") from None
            closed = process.registry.closed(attempt)
            if closed is None:
                closed = Closed(fenced, body, ended)
                process.close(session, closed)
        if not closed.ended_with(body):
            raise AdminError(409, "EndDiffers", f"attempt {attempt} was ended with other values")
        return _sent(closed.ended)

    def _session(self, attempt: str) -> Session:
        session = self._process.registry.find(attempt)
        if session is None:
            raise AdminError(
                404, "UnknownAttempt", f"this gateway (epoch {self._process.epoch}) has no attempt {attempt}"
            )
        return session

    async def hold(self, request: web.Request) -> web.StreamResponse:
        gate = self._process.gates.find(request.match_info["policy"])
        body = await _read(request, HoldPolicy)
        if gate is None:
            raise self._unknown_policy(request)
        return _answer(HeldPolicy(in_flight=await gate.hold(body.drain_seconds, self._process.config.hold_seconds)))

    async def release(self, request: web.Request) -> web.StreamResponse:
        gate = self._process.gates.find(request.match_info["policy"])
        body = await _read(request, ReleasePolicy)
        if gate is None:
            raise self._unknown_policy(request)
        gate.release()
        _log.info("policy %s goes on at version %s", request.match_info["policy"], body.version)
        return _answer(body)

    async def servers(self, request: web.Request) -> web.StreamResponse:
        model = self._process.models.trained.get(request.match_info["policy"])
        body = await _read(request, PolicyServerList)
        if model is None:
            raise self._unknown_policy(request)
        for index, url in enumerate(body.servers):
            if re.fullmatch(URL_PATTERN, url) is None:
                raise AdminError(400, "InvalidBody", f"servers.{index}: {url!r} is no base URL")
        model.serve_from(body.servers)
        _log.info("policy %s is served by %s", model.name, ", ".join(body.servers))
        return _answer(body)

    def _unknown_policy(self, request: web.Request) -> AdminError:
        policy = request.match_info["policy"]
        known = ", ".join(self._process.models.trained)
        return AdminError(404, "UnknownPolicy", f"there is no policy {policy!r}; this run trains: {known}")

    async def drain(self, request: web.Request) -> web.StreamResponse:
        self._process.drain()
        return _answer(self._process.status())


async def _read(request: web.Request, kind: type[Body]) -> Body:
    try:
        return kind.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise AdminError(400, "InvalidBody", f"{where}: {first['msg']}") from None


def _check_end(body: EndAttempt) -> None:
    if body.outcome not in names.CLASSES:
        raise AdminError(400, "InvalidBody", f"outcome: {body.outcome!r} is none of {', '.join(names.CLASSES)}")
    if body.reward is not None and not math.isfinite(body.reward):
        raise AdminError(400, "InvalidBody", f"reward: {body.reward} is not finite")


def _answer(message: BaseModel) -> web.Response:
    return _sent(message.model_dump_json())


def _sent(json: str) -> web.Response:
    return web.Response(text=json, content_type="application/json")


def _authorised(credential: str, metrics: Metrics) -> Middleware:
    expected = f"Bearer {credential}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/admin/"):
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                metrics.refused("unauthorized")
                raise AdminError(401, "Unauthorized", "the admin routes need the gateway's credential")
        return await handler(request)

    return check


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AdminError as error:
        status, reason, message = error.status, error.reason, str(error)
    except web.HTTPException as error:
        status, reason, message = error.status, error.reason.replace(" ", ""), error.reason
    if status >= 500:
        _log.warning("%s %s: %s", request.method, request.path, message)
    body = ProtocolError(error=message, reason=reason).model_dump_json()
    return web.Response(status=status, text=body, content_type="application/json")
