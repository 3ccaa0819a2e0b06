"""The queue's HTTP side (protocol/queue.py) and the run's status, on one port behind one credential."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from kitestring_api import names
from kitestring_rollout.protocol.gateway_admin import Message, ProtocolError
from kitestring_rollout.protocol.queue import Finish, FinishReply, Heartbeat, HeartbeatReply, LeaseRequest, Leases
from kitestring_rollout.protocol.run_status import RunStatus
from kitestring_trainer.queue.service import QueueClosedError, RolloutQueue
from kitestring_trainer.queue.state import AttemptClosedError, LeaseGoneError

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=Message)

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A finish carries the agent's output (16 MiB at most, more once escaped) and a tail of its log."""


class QueueServer:
    """The aiohttp application of one RolloutQueue."""

    def __init__(self, queue: RolloutQueue, status: Callable[[], RunStatus], credential: str) -> None:
        self._queue = queue
        self._status = status
        self._credential = f"Bearer {credential}".encode()
        self.rejected = 0
        """Requests without the credential."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_get(names.ROUTE_HEALTH, self._health)
        app.router.add_post(names.ROUTE_QUEUE_LEASE, self._lease)
        app.router.add_post(names.ROUTE_QUEUE_HEARTBEAT, self._heartbeat)
        app.router.add_post(names.ROUTE_QUEUE_FINISH, self._finish)
        app.router.add_get(names.ROUTE_RUN_STATUS, self._run_status)
        return app

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path != names.ROUTE_HEALTH:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._credential):
                self.rejected += 1
                return _problem(401, "Unauthorized", "the bearer credential is missing or wrong")
        try:
            return await handler(request)
        except QueueClosedError:
            return _problem(410, "RunEnded", "the run has ended")
        except LeaseGoneError:
            return _problem(410, "LeaseGone", "the lease is over; end the agent and report nothing")
        except AttemptClosedError:
            return _problem(409, "AttemptClosed", "the attempt is closed already")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return _problem(422, "InvalidMessage", f"{where}: {first['msg']}")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _lease(self, request: web.Request) -> web.Response:
        wanted = await _read(request, LeaseRequest)
        leases = await self._queue.lease(wanted.executor, wanted.capacity, wanted.wait_seconds)
        return _answer(Leases(leases=tuple(leases)))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        await _read(request, Heartbeat)
        cancel = self._queue.heartbeat(request.match_info["lease"])
        return _answer(HeartbeatReply(cancel=cancel, ttl_seconds=self._queue.rules.lease_seconds))

    async def _finish(self, request: web.Request) -> web.Response:
        finish = await _read(request, Finish)
        reply: FinishReply = await self._queue.finish(request.match_info["lease"], finish)
        return _answer(reply)

    async def _run_status(self, _: web.Request) -> web.Response:
        return _answer(self._status())


async def _read(request: web.Request, body: type[Body]) -> Body:
    return body.model_validate_json(await request.read())


def _answer(message: Message, status: int = 200) -> web.Response:
    return web.Response(status=status, body=message.model_dump_json().encode(), content_type="application/json")


def _problem(status: int, reason: str, error: str) -> web.Response:
    return _answer(ProtocolError(error=error, reason=reason), status)
