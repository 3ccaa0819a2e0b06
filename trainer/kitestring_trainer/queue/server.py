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
from kitestring_rollout.protocol.queue import (
    Finish,
    FinishReply,
    Heartbeat,
    HeartbeatReply,
    LeaseRequest,
    Leases,
    LostReply,
    LostRollout,
    WantedRollout,
    WantedRollouts,
)
from kitestring_rollout.protocol.run_status import RunStatus
from kitestring_trainer.live import LiveChange, LiveRefusedError, LiveState
from kitestring_trainer.queue.executors import credential_for, image_of, resources_of, rollout_of
from kitestring_trainer.queue.service import QueueClosedError, RolloutQueue
from kitestring_trainer.queue.state import AttemptClosedError, LeaseGoneError

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=Message)

MAX_BODY_BYTES = 64 * 1024 * 1024
"""A finish carries the agent's output (16 MiB at most, more once escaped) and a tail of its log."""
MAX_WANTED = 10_000
"""As many as a pool may have replicas."""
_ROLLOUT = web.RequestKey("rollout", str)
"""Key under which a request keeps the one rollout that its credential is for."""


class QueueServer:
    """The aiohttp application of one RolloutQueue."""

    def __init__(
        self,
        queue: RolloutQueue,
        status: Callable[[], RunStatus],
        credential: str,
        change: Callable[[LiveChange], LiveState],
    ) -> None:
        """`change` applies what may change while the run goes on; raises LiveRefusedError."""
        self._queue = queue
        self._status = status
        self._change = change
        self._credential = credential
        self.rejected = 0
        """Requests without the credential."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_get(names.ROUTE_HEALTH, self._health)
        app.router.add_post(names.ROUTE_QUEUE_LEASE, self._lease)
        app.router.add_post(names.ROUTE_QUEUE_HEARTBEAT, self._heartbeat)
        app.router.add_post(names.ROUTE_QUEUE_FINISH, self._finish)
        app.router.add_get(names.ROUTE_QUEUE_WANTED, self._wanted)
        app.router.add_post(names.ROUTE_QUEUE_LOST, self._lost)
        app.router.add_get(names.ROUTE_RUN_STATUS, self._run_status)
        app.router.add_put(names.ROUTE_RUN_LIVE, self._live)
        return app

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path != names.ROUTE_HEALTH and not self._admit(request):
            self.rejected += 1
            return _last(_problem(401, "Unauthorized", "the bearer credential is missing or wrong, or not for this"))
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

    def _admit(self, request: web.Request) -> bool:
        """The queue's credential opens everything; that of one rollout its lease, heartbeat and finish."""
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer":
            return False
        if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._credential.encode()):
            return True
        rollout = rollout_of(given, self._credential)
        if rollout is None:
            return False
        request[_ROLLOUT] = rollout
        if request.path == names.ROUTE_QUEUE_LEASE:
            return True
        lease = request.match_info.get("lease")
        return lease is not None and self._queue.rollout_of_lease(lease) in (rollout, None)

    async def _health(self, _: web.Request) -> web.Response:
        """200 while rollouts can be leased; whether there are any now is another matter."""
        try:
            await self._queue.lease("health", capacity=0, wait_seconds=0.0)
        except QueueClosedError:
            return _last(_problem(503, "RunEnded", "the run has ended"))
        return _last(web.Response(text="ok\n"))

    async def _lease(self, request: web.Request) -> web.Response:
        wanted = await _read(request, LeaseRequest)
        only = request.get(_ROLLOUT)
        if only is not None and wanted.rollout != only:
            self.rejected += 1
            return _problem(401, "Unauthorized", f"this credential leases rollout {only} and no other")
        try:
            leases = await self._queue.lease(wanted.executor, wanted.capacity, wanted.wait_seconds, wanted.rollout)
        except LookupError:
            return _problem(404, "RolloutGone", f"rollout {wanted.rollout} has ended, or is of no step in progress")
        return _answer(Leases(leases=tuple(leases)))

    async def _heartbeat(self, request: web.Request) -> web.Response:
        await _read(request, Heartbeat)
        cancel = self._queue.heartbeat(request.match_info["lease"])
        return _answer(HeartbeatReply(cancel=cancel, ttl_seconds=self._queue.rules.lease_seconds))

    async def _finish(self, request: web.Request) -> web.Response:
        finish = await _read(request, Finish)
        reply: FinishReply = await self._queue.finish(request.match_info["lease"], finish)
        return _answer(reply)

    async def _wanted(self, request: web.Request) -> web.Response:
        limit = request.query.get("limit", "")
        if not limit.isdecimal() or not 0 < int(limit) <= MAX_WANTED:
            return _problem(422, "InvalidMessage", f"limit: {limit!r} is no number from 1 to {MAX_WANTED}")
        rules = self._queue.rules.per_task
        wanted = [
            WantedRollout(
                rollout=entry.rollout,
                number=entry.number,
                image=image_of(task, rules),
                resources=resources_of(task, rules),
                credential=credential_for(entry.rollout, self._credential),
            )
            for entry, task in self._queue.wanted(int(limit))
        ]
        return _answer(WantedRollouts(rollouts=tuple(wanted)))

    async def _lost(self, request: web.Request) -> web.Response:
        lost = await _read(request, LostRollout)
        if lost.outcome not in names.CLASSES or lost.outcome == names.CLASS_SUCCEEDED:
            return _problem(422, "InvalidMessage", f"outcome: {lost.outcome!r} is no failure class")
        rollout = request.match_info["rollout"]
        return _answer(LostReply(changed=self._queue.lost(rollout, lost.number, lost.outcome, lost.message)))

    async def _run_status(self, _: web.Request) -> web.Response:
        return _answer(self._status())

    async def _live(self, request: web.Request) -> web.Response:
        change = await _read(request, LiveChange)
        try:
            return _answer(self._change(change))
        except LiveRefusedError as error:
            return _problem(409, error.reason, str(error))


async def _read(request: web.Request, body: type[Body]) -> Body:
    return body.model_validate_json(await request.read())


def _answer(message: Message, status: int = 200) -> web.Response:
    return web.Response(status=status, body=message.model_dump_json().encode(), content_type="application/json")


def _last(response: web.Response) -> web.Response:
    """Of its connection: strangers, who may be agents, hold none with answers that they do not read."""
    response.force_close()
    return response


def _problem(status: int, reason: str, error: str) -> web.Response:
    return _answer(ProtocolError(error=error, reason=reason), status)
