"""A queue for one worker that gives a lease when asked for one and notes when things happen."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from kitestring_api import names
from kitestring_rollout.protocol.queue import Finish, FinishReply, HeartbeatReply, Lease, LeaseRequest, Leases

TTL_SECONDS = 60.0


class BenchQueue:
    """Leases are handed out as `give` makes them; `finished` holds (lease, monotonic time, finish) in order."""

    def __init__(self) -> None:
        self.changed = asyncio.Condition()
        self.leased_at: dict[str, float] = {}
        self.finished: list[tuple[str, float, Finish]] = []
        self.url = ""
        self._waiting: list[Lease] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post(names.ROUTE_QUEUE_LEASE, self._lease)
        app.router.add_post(names.ROUTE_QUEUE_HEARTBEAT, self._heartbeat)
        app.router.add_post(names.ROUTE_QUEUE_FINISH, self._finish)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def give(self, count: int) -> None:
        async with self.changed:
            self._waiting += [_lease() for _ in range(count)]
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _lease(self, request: web.Request) -> web.Response:
        asked = LeaseRequest.model_validate_json(await request.read())
        try:
            async with asyncio.timeout(asked.wait_seconds):
                await self.until(lambda: bool(self._waiting))
        except TimeoutError:
            return web.Response(text=Leases().model_dump_json())
        given, self._waiting = self._waiting[: asked.capacity], self._waiting[asked.capacity :]
        body = Leases(leases=tuple(given)).model_dump_json()
        async with self.changed:
            self.leased_at.update({lease.lease: time.monotonic() for lease in given})
            self.changed.notify_all()
        return web.Response(text=body)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text=HeartbeatReply(cancel=False, ttl_seconds=TTL_SECONDS).model_dump_json())

    async def _finish(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        finish = Finish.model_validate_json(await request.read())
        async with self.changed:
            self.finished.append((request.match_info["lease"], now, finish))
            self.changed.notify_all()
        return web.Response(text=FinishReply(outcome="Succeeded", reward=None, retry=False).model_dump_json())


def _lease() -> Lease:
    attempt = str(uuid.uuid4())
    return Lease(
        lease=attempt,
        rollout="t000001-00000000-000",
        attempt=attempt,
        group="t000001-00000000",
        step=1,
        mode="train",
        task_index=0,
        task={"question": "What is 6 * 7?"},
        base_url="http://127.0.0.1:9/r/token",
        token="token",
        traceparent="00-00000000000000000000000000000001-0000000000000001-01",
        model="policy",
        ttl_seconds=TTL_SECONDS,
        deadline_seconds=600.0,
    )
