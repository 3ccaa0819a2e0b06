"""The queue's thread: its event loop, its HTTP port, its clients, and calls into it from the trainer's threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import uvloop
from aiohttp import web

from kitestring_rollout.listener import Listener
from kitestring_rollout.protocol.run_status import RunStatus
from kitestring_trainer.errors import UserMistakeError
from kitestring_trainer.live import Change, no_change
from kitestring_trainer.queue.closing import Scorer
from kitestring_trainer.queue.gateways import Gateways, GatewayTimes
from kitestring_trainer.queue.leftovers import end_leftovers
from kitestring_trainer.queue.proofs import ProofSource, ProofWatch
from kitestring_trainer.queue.rollouts import QueueRules
from kitestring_trainer.queue.server import QueueServer
from kitestring_trainer.queue.service import RolloutQueue

logger = logging.getLogger(__name__)
SWEPT_SECONDS = 1.0
"""How long a start waits for gateways to say what they hold."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class QueueSettings:
    rules: QueueRules
    host: str
    port: int
    credential: str
    gateways: tuple[str, ...]
    gateway_credential: str
    gateway_gone_seconds: float
    poll_seconds: float


class QueueThread:
    """Owns the loop in which the RolloutQueue lives. `start` before anything else, `close` on every way out."""

    def __init__(
        self,
        settings: QueueSettings,
        score: Scorer,
        proofs: ProofSource,
        status: Callable[[], RunStatus],
        change: Change = no_change,
    ) -> None:
        """`status` and `change` answer the routes of the run; both are called in the queue's loop."""
        self._settings = settings
        self._change = change
        self._score = score
        self._proofs = proofs
        self._status = status
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue", daemon=True)
        self._listener: Listener | None = None
        self._failed: Future[None] = Future()
        self.session: aiohttp.ClientSession
        self.gateways: Gateways
        self.queue: RolloutQueue

    def start(self) -> str:
        """Listen; the URL of the port. Raises UserMistakeError when the port is taken."""
        self._thread.start()
        return self.call(self._start())

    def call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run `work` in the queue's loop and wait for it, from any other thread."""
        return self.submit(work).result()

    def call_or_fail(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The same for work that may take long: `fail` cancels it, and its error is raised here."""
        future = self.submit(work)
        either: set[Future[Any]] = {future, self._failed}
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            future.cancel()
            self._failed.result()
        return future.result()

    def submit(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def fail(self, error: BaseException) -> None:
        """End every plan in progress, and every later one, with this error. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no plan
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self.queue.fail(error)
        if not self._failed.done():
            self._failed.set_exception(error)

    def end_leftovers(self) -> None:
        """Begin to end what earlier processes of the run left open at the gateways; none opens an attempt before it has
        said what it holds. Those that cannot be reached now are left to themselves after a moment."""
        self.call(self._end_leftovers())

    async def _end_leftovers(self) -> None:
        self.sweep()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gateways.all_swept.wait(), SWEPT_SECONDS)

    def sweep(self) -> None:
        """In the loop: the same for gateways that are new."""
        urls = self.gateways.shut_unswept()
        if urls:
            self.queue.spawn(end_leftovers(self.gateways, self._settings.rules.run, urls))

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the queue closes; an error in it ends every plan."""
        self.call(self._watch_over(work))

    async def _watch_over(self, work: Coroutine[Any, Any, None]) -> None:
        self.queue.spawn(work)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self.call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        settings = self._settings
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=256))
        times = GatewayTimes(gone_after=settings.gateway_gone_seconds)
        self.gateways = Gateways(settings.gateways, settings.gateway_credential, self.session, times)
        self.queue = RolloutQueue(settings.rules, self.gateways, self._score, self._watch)
        server = QueueServer(self.queue, self._status, settings.credential, self._change)
        # Without cancellation a worker that went away while it waited would still be given a lease.
        runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=5.0)
        self._listener = Listener(runner)
        try:
            _, port = await self._listener.start(settings.host, settings.port)
        except OSError as error:
            raise UserMistakeError(
                f"the rollout queue cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
                "choose another port, or 0 for any free one"
            ) from error
        return f"http://{settings.host}:{port}"

    def _watch(self, queue: RolloutQueue) -> ProofWatch:
        watch = ProofWatch(self._proofs, queue.proof_found, queue.watch_broke, poll_seconds=self._settings.poll_seconds)
        watch.start()
        return watch

    async def _close(self) -> None:
        if hasattr(self, "queue"):
            await self.queue.close()
        if self._listener is not None:
            await self._listener.close()
        await self.session.close()
