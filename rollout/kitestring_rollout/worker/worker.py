"""The worker's loop: leases up to its free capacity, runs an agent for each lease, says how each ended."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kitestring_rollout.protocol.queue import Finish, Lease, LeaseRequest
from kitestring_rollout.worker.attempt import Attempt
from kitestring_rollout.worker.config import WorkerConfig
from kitestring_rollout.worker.gateway_check import ProvenGateways
from kitestring_rollout.worker.program import PythonProgram
from kitestring_rollout.worker.queue_client import LeaseGone, QueueAway, QueueClient, QueueRefused, RunEnded
from kitestring_rollout.worker.running_agent import CannotLaunch, Launcher, LauncherLost

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
STILLBORN_IN_A_ROW = 3
"""Attempts whose agents could not be made ready, one after the other, after which a worker takes no more: it would fail
them at once, and so draw most of those that wait."""
STILLBORN_SECONDS = 10.0
"""For so long at least, from the first of them to the last: a shortage of processes or memory passes."""
STILLBORN_PAUSE = 5.0
"""After each of them; then one attempt is taken, to see whether there can be an agent again."""
LAST_WORD_SECONDS = 30.0
"""How long, after it was told to stop, the worker tries to reach the queue with what is still to be said."""


class Unfit(Exception):
    """No agent can be made ready here any more; a new start of worker and launcher may help. The text says why."""


def is_unfit(stillborn: Sequence[float]) -> bool:
    """Whether there is nothing to hope for, given when attempts in a row died before there was an agent, in seconds."""
    return len(stillborn) >= STILLBORN_IN_A_ROW and stillborn[-1] - stillborn[0] >= STILLBORN_SECONDS


class Worker:
    """Runs until the run (or its one rollout) has ended or `stop` is called; then no process of an agent is left."""

    def __init__(
        self,
        config: WorkerConfig,
        queue: QueueClient,
        launcher: Launcher,
        *,
        base: Mapping[str, str],
        scratch_root: Path,
        program: PythonProgram | None,
    ) -> None:
        self._config = config
        self._queue = queue
        self._launcher = launcher
        self._base = base
        self._scratch_root = scratch_root
        self._program = program
        self._gateways = ProvenGateways()
        self._name = config.name.replace("{hostname}", socket.gethostname())
        self._stopping = asyncio.Event()
        self._stillborn: list[tuple[float, str]] = []
        """When the last attempts in a row died before there was an agent, and of what."""
        self._running: dict[asyncio.Task[Finish | None], Attempt] = {}
        self._reporting: set[asyncio.Task[None]] = set()
        self._answered = False
        self._away = False
        self._problem = ""

    @property
    def reaches_queue(self) -> bool:
        """Whether the queue answered when it was last asked for a lease."""
        return self._answered and not self._away

    def stop(self) -> None:
        """No new leases; running agents get `drain_seconds`, then they are cancelled and reported so."""
        self._stopping.set()

    async def run(self) -> None:
        """Returns at the end of the run or after `stop`. QueueRefused: the queue does not take us. Unfit, when whatever
        ran has ended by itself."""
        done = False
        try:
            done = await self._work()
            while done and await self._begins_again():
                done = await self._work()
        finally:
            await self._drop_agents()
            await self._launcher.close(done)

    async def _work(self) -> bool:
        """Until the run (or its one rollout) has ended: true, and no agent is left; or until we are to stop: false."""
        done = False
        try:
            while not self._stopping.is_set():
                if is_unfit([at for at, _ in self._stillborn]):
                    count, (_, last) = len(self._stillborn), self._stillborn[-1]
                    if await self._until_reported():
                        raise Unfit(f"{count} agents in a row could not be made ready: {last}")
                    break
                free = self._config.capacity - len(self._running)
                if free <= 0 or len(self._reporting) > self._config.capacity:
                    await self._wait({*self._running, *self._reporting})
                    continue
                await self._until_ready()
                if self._stillborn:
                    await self._pause(STILLBORN_PAUSE)
                    if self._stopping.is_set():
                        continue
                    free = 1
                for lease in await self._lease(free):
                    self._begin(lease)
                if self._running and self._config.rollout is not None:
                    done = await self._until_reported()
                    break
            await self._drain()
        except RunEnded:
            log.info("the run has ended")
            await self._drop_agents()
            done = True
        return done

    async def _begins_again(self) -> bool:
        """Whether a queue is there again within `linger_seconds`: the run's trainer was only started anew."""
        if self._config.linger_seconds <= 0 or self._config.rollout is not None:
            return False
        try:
            async with asyncio.timeout(self._config.linger_seconds):
                while not self._stopping.is_set():
                    try:
                        leases = await self._lease(self._config.capacity)
                    except RunEnded:
                        await self._pause(LONGEST_PAUSE)
                        continue
                    for lease in leases:
                        self._begin(lease)
                    return not self._stopping.is_set()
        except TimeoutError:
            log.info("nobody told this worker to end")
        return False

    async def _until_ready(self) -> None:
        """Until agents can be started, or we are to stop.

        What prevents it for good is each attempt's failure, by the text that says why: the queue decides what follows.
        """
        waiting = asyncio.create_task(self._launcher.ready())
        await self._wait({waiting})
        if not waiting.done():
            waiting.cancel()
            return
        try:
            waiting.result()
            self._problem = ""
        except (CannotLaunch, LauncherLost) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.error("no agent can be started: %s", error)

    async def _until_reported(self) -> bool:
        """Until nothing runs and all is said; false when we are to stop before."""
        while (self._running or self._reporting) and not self._stopping.is_set():
            await self._wait({*self._running, *self._reporting})
        return not self._stopping.is_set()

    async def _lease(self, free: int) -> tuple[Lease, ...]:
        """Leases for `free` agents, none when there are none now or we are to stop; RunEnded."""
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            # Without patience at first: whether the queue can be reached is to be known soon.
            wait = self._config.poll_seconds if self.reaches_queue else 0.0
            request = LeaseRequest(executor=self._name, capacity=free, wait_seconds=wait, rollout=self._config.rollout)
            asking = asyncio.create_task(self._queue.lease(request))
            try:
                await self._wait({asking})
            except asyncio.CancelledError:
                asking.cancel()
                raise
            if not asking.done():
                asking.cancel()
                return ()
            try:
                leases = asking.result()
            except QueueAway as error:
                if not self._away:
                    log.warning("the queue at %s is away (%s); trying again", self._config.queue_url, error)
                self._away = True
                await self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if self._away:
                log.info("the queue is back")
            self._answered, self._away = True, False
            return leases
        return ()

    async def _wait(self, tasks: set[asyncio.Task[object]]) -> None:
        """Until one of the tasks is done or we are to stop."""
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds * random.uniform(0.5, 1.0)):  # noqa: S311 (spreads the workers)
                await self._stopping.wait()
        except TimeoutError:
            return

    def _begin(self, lease: Lease) -> None:
        attempt = Attempt(self._config, lease, self._launcher, self._queue, self._gateways)
        task = asyncio.create_task(attempt.run(self._base, self._scratch_root, self._program))
        self._running[task] = attempt
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Finish | None]) -> None:
        attempt = self._running.pop(task)
        if task.cancelled():
            return
        finish = task.result()
        if finish is not None and attempt.is_stillborn:
            self._stillborn.append((time.monotonic(), finish.message or finish.ended))
        # one that was there before them says nothing of now
        launched = [one.leased_at for one in (attempt, *self._running.values()) if one.was_launched]
        if launched:
            self._stillborn = [(at, why) for at, why in self._stillborn if at > max(launched)]
        if finish is not None:
            reporting = asyncio.create_task(self._report(attempt.lease, finish))
            self._reporting.add(reporting)
            reporting.add_done_callback(self._reporting.discard)

    async def _report(self, lease: Lease, finish: Finish) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                reply = await self._queue.finish(lease.lease, finish)
            except LeaseGone:
                log.warning("attempt %s of %s: closed before its end was reported", lease.attempt, lease.rollout)
            except QueueRefused as error:
                log.error("attempt %s of %s: %s", lease.attempt, lease.rollout, error)
            except QueueAway as error:
                log.info("attempt %s of %s: cannot report yet (%s)", lease.attempt, lease.rollout, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            else:
                log.info("attempt %s of %s: %s, %s", lease.attempt, lease.rollout, finish.ended, reply.outcome)
            return

    async def _drain(self) -> None:
        for attempt in self._running.values():
            attempt.drain()
        if self._running:
            await asyncio.wait(self._running, timeout=self._config.drain_seconds)
        for attempt in self._running.values():
            attempt.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await asyncio.sleep(0)  # lets the reports of the last ones begin
        if self._reporting:
            await asyncio.wait(self._reporting, timeout=LAST_WORD_SECONDS)

    async def _drop_agents(self) -> None:
        for attempt in self._running.values():
            attempt.drop()
        if self._running:
            await asyncio.wait(self._running)
        for task in list(self._reporting):
            task.cancel()
