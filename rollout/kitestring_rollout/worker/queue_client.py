"""The queue as an executor sees it: lease, heartbeat, finish."""

from __future__ import annotations

import aiohttp

from kitestring_api import names
from kitestring_rollout.protocol.gateway_admin import Message
from kitestring_rollout.protocol.queue import (
    Finish,
    FinishReply,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseRequest,
    Leases,
)

CONNECT_SECONDS = 5.0
HEARTBEAT_SECONDS = 10.0
FINISH_SECONDS = 900.0
"""A finish is answered when the attempt is closed and scored, by the user's command too."""


OUTPUT_BYTES = 60 << 20
"""Of an output in JSON, which makes six bytes of a control character. The queue refuses more than 64 MiB unread."""
MOST_BYTES_OF_CHARACTER = 6


class RunEnded(Exception):
    """The run is over, or the one rollout that was asked for: no further lease will come."""


class LeaseGone(Exception):
    """The lease expired or its attempt is closed: nobody waits for what we would say."""


class QueueAway(Exception):
    """No answer, or none that makes sense yet; worth another try."""


class QueueRefused(Exception):
    """The queue does not take what we say, and never will; the text names cause and remedy."""


def reportable(finish: Finish) -> Finish:
    """With its output cut where a queue would not take it as a whole."""
    room = OUTPUT_BYTES // MOST_BYTES_OF_CHARACTER
    if len(finish.output) <= room or len(finish.model_dump_json(include={"output"}).encode()) <= OUTPUT_BYTES:
        return finish
    return finish.model_copy(update={"output": finish.output[:room], "output_truncated": True})


class QueueClient:
    """Speaks `protocol/queue.py` over one session; every method raises QueueAway or QueueRefused besides its own."""

    def __init__(self, session: aiohttp.ClientSession, url: str, credential: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {credential}", "Content-Type": "application/json"}

    async def lease(self, request: LeaseRequest) -> tuple[Lease, ...]:
        """Waits for leases as long as the request says; RunEnded when there will be none."""
        status, body = await self._post(names.ROUTE_QUEUE_LEASE, request, request.wait_seconds + HEARTBEAT_SECONDS)
        if status == 410 or (status == 404 and request.rollout is not None):
            raise RunEnded
        if status != 200:
            raise QueueRefused(f"no queue answers at {self._url} (HTTP {status}); correct queue_url")
        return Leases.model_validate_json(body).leases

    async def heartbeat(self, lease: str, running_seconds: float) -> HeartbeatReply:
        """Says that the agent still runs; LeaseGone when it should not."""
        route = names.ROUTE_QUEUE_HEARTBEAT.format(lease=lease)
        status, body = await self._post(route, Heartbeat(running_seconds=running_seconds), HEARTBEAT_SECONDS)
        if status in (404, 409, 410):
            raise LeaseGone
        return HeartbeatReply.model_validate_json(body)

    async def finish(self, lease: str, finish: Finish) -> FinishReply:
        """Says how the agent ended; LeaseGone when the attempt was closed before."""
        route = names.ROUTE_QUEUE_FINISH.format(lease=lease)
        status, body = await self._post(route, reportable(finish), FINISH_SECONDS)
        if status in (404, 409, 410):
            raise LeaseGone
        return FinishReply.model_validate_json(body)

    async def _post(self, route: str, message: Message, seconds: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        try:
            async with self._session.post(
                self._url + route, data=message.model_dump_json(), headers=self._headers, timeout=timeout
            ) as reply:
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise QueueAway(f"{type(error).__name__}: {error}") from error
        if reply.status in (401, 403):
            raise QueueRefused(f"the queue at {self._url} refuses the credential of queue_credential_file; correct it")
        if reply.status >= 500 or reply.status in (408, 425, 429):
            raise QueueAway(f"HTTP {reply.status}: {body[:200].decode(errors='replace')}")
        if reply.status >= 400 and reply.status not in (404, 409, 410):
            raise QueueRefused(
                f"{route.rpartition('/')[2]}: HTTP {reply.status}: {body[:500].decode(errors='replace')}"
            )
        return reply.status, body
