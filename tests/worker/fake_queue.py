"""A scripted rollout queue: hands out the leases that a test gives it and records what executors say."""

from __future__ import annotations

import asyncio
import functools
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiohttp import web

from kitestring_api import names
from kitestring_rollout.protocol.queue import (
    Finish,
    FinishReply,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseRequest,
    Leases,
)

CREDENTIAL = "queue-credential-5f1d"


def make_lease(task: dict[str, Any] | None = None, **fields: Any) -> Lease:
    attempt = str(uuid.uuid4())
    values = {
        "lease": f"lease-{attempt}",
        "rollout": "t000001-00000000-000",
        "attempt": attempt,
        "group": "t000001-00000000",
        "step": 1,
        "mode": "train",
        "task_index": 0,
        "task": {"question": "What is 6 * 7?"} if task is None else task,
        "base_url": f"{answering()}/r/token-{attempt}",
        "token": f"token-{attempt}",
        "traceparent": f"00-{uuid.UUID(attempt).hex}-00f067aa0ba902b7-01",
        "model": "policy",
        "ttl_seconds": 30.0,
        "deadline_seconds": 20.0,
        **fields,
    }
    return Lease(**values)


@functools.cache
def answering() -> str:
    """URL of something that answers, as a gateway does to whoever asks whether it can be reached."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class FakeQueue:
    """Start it with `start`; `put` gives a lease, `finished` waits for how it ended."""

    def __init__(self) -> None:
        self.waiting: list[Lease] = []
        self.leased: dict[str, Lease] = {}
        self.finishes: dict[str, Finish] = {}
        self.beats: dict[str, int] = {}
        self.requests: list[LeaseRequest] = []
        self.cancelled: set[str] = set()
        self.gone: set[str] = set()
        self.ended = False
        self.missing = False
        """Whether a rollout that is asked for by name can never be had."""
        self.asking = 0
        """Executors that wait for a lease."""
        self.changed = asyncio.Condition()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Binds a free port; after `stop`, the same one again."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(names.ROUTE_QUEUE_LEASE, self._lease)
        app.router.add_post(names.ROUTE_QUEUE_HEARTBEAT, self._heartbeat)
        app.router.add_post(names.ROUTE_QUEUE_FINISH, self._finish)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def put(self, lease: Lease) -> Lease:
        self.waiting.append(lease)
        await self._note()
        return lease

    async def end(self) -> None:
        async with self.changed:
            self.ended = True
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(condition)

    async def finished(self, lease: Lease, seconds: float = 30.0) -> Finish:
        await self.until(lambda: lease.lease in self.finishes, seconds)
        return self.finishes[lease.lease]

    async def running(self, lease: Lease) -> None:
        """Until the lease was taken."""
        await self.until(lambda: lease.lease in self.leased)

    async def run(self, lease: Lease) -> Finish:
        return await self.finished(await self.put(lease))

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _check(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {CREDENTIAL}":
            raise web.HTTPUnauthorized(text='{"error": "no", "reason": "Unauthorized"}')

    async def _lease(self, request: web.Request) -> web.Response:
        self._check(request)
        asked = LeaseRequest.model_validate_json(await request.read())
        self.requests.append(asked)
        await self._note()
        self.asking += 1
        try:
            await self.until(lambda: self.ended or self.missing or bool(self.waiting), asked.wait_seconds)
        except TimeoutError:
            pass
        finally:
            self.asking -= 1
        if self.ended:
            return web.Response(status=410, text='{"error": "ended", "reason": "RunEnded"}')
        if self.missing and asked.rollout is not None:
            return web.Response(status=404, text='{"error": "no such rollout", "reason": "RolloutGone"}')
        given, self.waiting = self.waiting[: asked.capacity], self.waiting[asked.capacity :]
        self.leased.update({lease.lease: lease for lease in given})
        await self._note()
        return web.Response(text=Leases(leases=tuple(given)).model_dump_json())

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._check(request)
        Heartbeat.model_validate_json(await request.read())
        lease = request.match_info["lease"]
        self.beats[lease] = self.beats.get(lease, 0) + 1
        await self._note()
        if lease in self.gone or lease not in self.leased:
            return web.Response(status=410, text='{"error": "gone", "reason": "LeaseGone"}')
        reply = HeartbeatReply(cancel=lease in self.cancelled, ttl_seconds=self.leased[lease].ttl_seconds)
        return web.Response(text=reply.model_dump_json())

    async def _finish(self, request: web.Request) -> web.Response:
        self._check(request)
        finish = Finish.model_validate_json(await request.read())
        lease = request.match_info["lease"]
        if lease in self.gone or self.leased[lease].attempt != finish.attempt:
            return web.Response(status=409, text='{"error": "closed", "reason": "AttemptClosed"}')
        self.finishes[lease] = finish
        await self._note()
        return web.Response(text=FinishReply(outcome="Succeeded", reward=None, retry=False).model_dump_json())
