"""The collector's routes. A request is answered with 200 only when its object is durable."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aiohttp import web
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # ships no types
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kitestring_api import names
from kitestring_rollout.collector.bodies import BodyTooLarge, BodyUnreadable, Received, read_request
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.collector.metrics import Metrics
from kitestring_rollout.storage import ObjectStore, StoreRefused, StoreUnavailable
from kitestring_rollout.traces.object_keys import new_key

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 3.0
_PROTOBUF = "application/x-protobuf"
_CONTENT_TYPES = (_PROTOBUF, "application/protobuf")
_ENCODINGS = {"": "identity", "identity": "identity", "gzip": "gzip"}


@dataclass(frozen=True, slots=True)
class Credentials:
    """Bearer credentials per route; None: the route takes nothing."""

    trusted: str
    agent: str | None


class _Refused(Exception):
    """Ends a request with an answer other than 200."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers


class Collector:
    """Takes OTLP requests and writes each as one object; `application()` gives its routes."""

    def __init__(self, config: CollectorConfig, store: ObjectStore, credentials: Credentials) -> None:
        self._config = config
        self._store = store
        self._credentials = credentials
        self._metrics = Metrics()
        self._threads = ThreadPoolExecutor(config.write_threads, thread_name_prefix="store")
        self._pending = 0
        self._available = True
        self._looking: asyncio.Future[str | None] | None = None

    def application(self) -> web.Application:
        """Serve it with `auto_decompress=False`: decompression is bounded here."""
        app = web.Application()
        app.router.add_post(
            names.ROUTE_OTLP_TRACES, self._route("traces", names.PREFIX_TRACES, self._credentials.trusted)
        )
        app.router.add_post(
            names.ROUTE_OTLP_AGENT_TRACES, self._route("agent", names.PREFIX_AGENT, self._credentials.agent)
        )
        app.router.add_get(names.ROUTE_HEALTH, self._health)
        app.router.add_get(names.ROUTE_READY, self._ready)
        app.router.add_get(names.ROUTE_METRICS, self._show_metrics)
        app.on_cleanup.append(self._close)
        return app

    def _route(
        self, route: str, prefix: str, credential: str | None
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            try:
                self._authorize(request, credential)
                received = await self._receive(request, route, prefix)
                response = _protobuf(200, ExportTraceServiceResponse().SerializeToString())
                self._metrics.spans.labels(route).inc(received.spans)
            except _Refused as refused:
                response = _protobuf(
                    refused.status, Status(message=refused.message).SerializeToString(), refused.headers
                )
                if refused.status in (408, 413):  # the rest of the body is not read
                    response.force_close()
            self._metrics.requests.labels(route, response.status).inc()
            return response

        return answer

    def _authorize(self, request: web.Request, credential: str | None) -> None:
        if credential is None:
            raise _Refused(404, "this collector takes no spans of agents: its config has no agent_credential_file")
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {credential}".encode()):
            raise _Refused(401, "the bearer credential is missing or wrong", **{"WWW-Authenticate": "Bearer"})

    async def _receive(self, request: web.Request, route: str, prefix: str) -> Received:
        if request.content_type not in _CONTENT_TYPES:
            raise _Refused(415, f"Content-Type {request.content_type} is not taken; send {_PROTOBUF}")
        encoding = _ENCODINGS.get(request.headers.get("Content-Encoding", "").lower())
        if encoding is None:
            raise _Refused(415, "Content-Encoding must be gzip or identity")
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if taken + size > self._config.max_request_bytes:
                raise _Refused(413, f"the request has more than {self._config.max_request_bytes} bytes")
            if self._pending + size > self._config.max_pending_bytes:
                raise self._later("too many bytes wait to be stored")
            taken += size
            self._pending += size
            self._metrics.pending_bytes.set(self._pending)

        try:
            body = await self._read(request, take)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._store_body, body, encoding, route, prefix)
        finally:
            self._pending -= taken
            self._metrics.pending_bytes.set(self._pending)

    async def _read(self, request: web.Request, take: Callable[[int], None]) -> bytes:
        if (request.content_length or 0) > self._config.max_request_bytes:
            raise _Refused(413, f"the request has more than {self._config.max_request_bytes} bytes")
        chunks = []
        try:
            async with asyncio.timeout(self._config.body_seconds):
                async for chunk in request.content.iter_any():
                    take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError as error:
            raise _Refused(408, f"the body did not come within {self._config.body_seconds:g} s") from error
        return b"".join(chunks)

    def _store_body(self, body: bytes, encoding: str, route: str, prefix: str) -> Received:
        """In a thread of the pool."""
        try:
            received = read_request(body, encoding, self._config.max_request_bytes)
        except BodyTooLarge as error:
            raise _Refused(413, str(error)) from error
        except BodyUnreadable as error:
            raise _Refused(400, str(error)) from error
        if not received.spans:
            return received
        started = time.perf_counter()
        try:
            self._store.put(new_key(prefix), received.data)
        except StoreUnavailable as error:
            if self._available:
                _log.error("objects cannot be written, answering 503 until they can: %s", error)
            self._set_available(False)
            raise self._later("the object store cannot be written now") from error
        if not self._available:
            _log.info("objects can be written again")
        self._set_available(True)
        self._metrics.write_seconds.observe(time.perf_counter() - started)
        self._metrics.stored_bytes.labels(route).inc(len(received.data))
        return received

    def _set_available(self, available: bool) -> None:
        self._available = available
        self._metrics.store_available.set(int(available))

    def _later(self, message: str) -> _Refused:
        return _Refused(503, message, **{"Retry-After": str(self._config.retry_after_seconds)})

    async def _health(self, _: web.Request) -> web.Response:
        """200 while the process serves, whatever the store does: clients are told 503 by the routes themselves."""
        return web.json_response({"store": "available" if self._available else "unavailable"})

    async def _ready(self, _: web.Request) -> web.Response:
        """200 while the store answers, were it with a refusal: these credentials may be for writing alone. What writes
        find says nothing here, since a collector that nobody is sent to would never find otherwise."""
        looking = self._looking
        if looking is None or looking.done():  # one look at a time: a store that hangs must not hold more threads
            looking = self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
        try:
            problem = await asyncio.wait_for(asyncio.shield(looking), _LOOK_SECONDS)
        except TimeoutError:
            problem = f"the object store has not answered for {_LOOK_SECONDS:g} s"
        if problem is not None:
            return web.json_response({"status": problem}, status=503)
        return web.json_response({"status": "ok"})

    def _look(self) -> str | None:
        """Why the store does not answer."""
        try:
            self._store.exists(f"{names.PREFIX_TRACES}ready")
        except StoreRefused:
            return None
        except StoreUnavailable as error:
            return str(error)
        return None

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _close(self, _: web.Application) -> None:
        self._threads.shutdown()


def _protobuf(status: int, body: bytes, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body, content_type=_PROTOBUF, headers=headers)
