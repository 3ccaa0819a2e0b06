"""Whether the queue's port says that it serves."""

from __future__ import annotations

from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from kitestring_trainer.live import no_change
from kitestring_trainer.queue.server import QueueServer
from kitestring_trainer.queue.service import QueueClosedError


class Queue:
    """As much of a queue as health asks of."""

    ended = False

    async def lease(self, *_: Any, **__: Any) -> list[Any]:
        if self.ended:
            raise QueueClosedError
        return []


async def test_healthy_while_rollouts_can_be_leased() -> None:
    queue = Queue()
    server = QueueServer(queue, lambda: None, "secret", no_change)  # type: ignore[arg-type]
    async with TestClient(TestServer(server.application())) as client:
        assert (await client.get("/health")).status == 200
        assert (await client.put("/run/v1/live", json={})).status == 401
        allowed = {"Authorization": "Bearer secret"}
        assert (await client.put("/run/v1/live", json={}, headers=allowed)).status == 409, "a rollout that is tried"
        queue.ended = True
        answer = await client.get("/health")
        assert (answer.status, (await answer.json())["reason"]) == (503, "RunEnded")
