"""One attempt on this machine: from its lease to the message that says how its agent ended."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL
from typing import Any, cast

from pydantic import ValidationError

from kitestring_rollout.launcher.launcher import UNKILLABLE_SECONDS, AgentEnd, AgentStart
from kitestring_rollout.protocol.queue import EndKind, Finish, Lease
from kitestring_rollout.worker.config import WorkerConfig
from kitestring_rollout.worker.delivery import TaskUndeliverable, agent_start
from kitestring_rollout.worker.gateway_check import ProvenGateways
from kitestring_rollout.worker.program import PythonProgram
from kitestring_rollout.worker.queue_client import LeaseGone, QueueAway, QueueClient, QueueRefused
from kitestring_rollout.worker.running_agent import (
    NONSENSE,
    START_SECONDS,
    CannotLaunch,
    GuardianEnded,
    GuardianLost,
    Launcher,
    LauncherKilled,
    LauncherLost,
    RunningAgent,
)

log = logging.getLogger(__name__)

SCRATCH_PREFIX = "kitestring-"
"""Of the agents' folders in the scratch root of a pod: a launcher that starts removes what is called so
(rollout/launcher/scratch.go)."""
BEATS_PER_TTL = 3
DRAIN_AWAY_SECONDS = 10.0
"""How long a worker that is to end lets an agent go on without a word from the queue: a trainer that was told to end at
the same time, as when the run is suspended, will never hear how it ended."""
MARGIN_SECONDS = 30.0
"""A guardian that is silent for so long after it should have reported is given up."""


class Attempt:
    """Runs the agent of one lease. `run` returns what to report, or None when the lease was lost."""

    def __init__(
        self, config: WorkerConfig, lease: Lease, launcher: Launcher, queue: QueueClient, gateways: ProvenGateways
    ) -> None:
        self.lease = lease
        self._config = config
        self._launcher = launcher
        self._queue = queue
        self._gateways = gateways
        self.leased_at = time.monotonic()
        self._agent: RunningAgent | None = None
        self._renewed_at = self.leased_at
        self._draining = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._cancelled = False
        self._gone = False
        self.is_stillborn = False
        """Whether its agent could not be made ready where the launcher is."""

    @property
    def was_launched(self) -> bool:
        """Whether there was a process of its agent, or was about to be."""
        return self._agent is not None and self._agent.was_launched

    async def run(self, base: Mapping[str, str], scratch_root: Path, program: PythonProgram | None) -> Finish | None:
        scratch = scratch_root / f"{SCRATCH_PREFIX}{uuid.uuid4().hex}"
        beating = asyncio.create_task(self._heartbeats())
        finish: Finish | None
        try:
            start = agent_start(self._config, self.lease, base, scratch, program)
            why = await self._way_barred()
            if why is None:
                self._agent = await self._launcher.start(start)
                if self._gone:
                    self._agent.kill()
                elif self._cancelled:
                    self._agent.cancel()
                end = await self._end(self._agent, start)
                self.is_stillborn = end.ended == "executorLost" and not self.was_launched
                finish = await self._excused(self._report(end, has_output=start.output_bytes > 0))
            else:
                log.warning("attempt %s of %s: %s; its agent was not started", *self._ids(), why)
                finish = self._finish("cutOff", why)
        except (TaskUndeliverable, CannotLaunch) as error:
            finish = self._finish("startFailed", str(error))
        except GuardianEnded as error:
            finish = self._finish("signalled", str(error), SIGKILL)
        except LauncherLost as error:
            finish = self._of_loss(error)
        except GuardianLost as error:
            self.is_stillborn = not self.was_launched
            finish = self._finish("executorLost", str(error))
        except ValidationError:  # what a finish cannot hold does not come from a guardian of ours
            finish = self._finish("executorLost", NONSENSE)
        finally:
            beating.cancel()
        return None if self._gone else finish

    def cancel(self) -> None:
        """Ends the agent, with its grace; `run` still returns a report."""
        self._cancelled = True
        self._unwanted.set()
        if self._agent is not None:
            self._agent.cancel()

    def drain(self) -> None:
        """The worker is to end: the agent goes on only as long as the queue answers."""
        self._draining.set()

    def drop(self) -> None:
        """Kills the agent; `run` returns None."""
        self._gone = True
        self._unwanted.set()
        if self._agent is not None:
            self._agent.kill()

    async def _way_barred(self) -> str | None:
        """Why an agent would not reach its gateway. Of a new pod the rules of the network can come after its start: its
        first agent would find the first connection refused."""
        if self._config.launcher_socket is None:
            return None  # on this machine no rule has still to come
        proving = asyncio.create_task(self._gateways.prove(self.lease.base_url))
        unwanted = asyncio.create_task(self._unwanted.wait())
        try:
            await asyncio.wait({proving, unwanted}, return_when=asyncio.FIRST_COMPLETED)
            return proving.result() if proving.done() else None
        finally:
            proving.cancel()
            unwanted.cancel()

    async def _end(self, agent: RunningAgent, start: AgentStart) -> AgentEnd:
        patience = start.seconds + start.grace_seconds + 2 * UNKILLABLE_SECONDS + MARGIN_SECONDS
        ended = asyncio.create_task(agent.ended())
        either: set[asyncio.Future[Any]] = {ended, agent.launching}
        await asyncio.wait(either, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if agent.launching.done():
            await asyncio.wait({ended}, timeout=patience)
        if not ended.done():
            loss = await agent.abandon()
            ended.cancel()
            raise loss
        return ended.result()

    async def _heartbeats(self) -> None:
        ttl = self.lease.ttl_seconds
        interval = ttl / BEATS_PER_TTL
        while True:
            await self._until_next_beat(interval)
            asked_at = time.monotonic()
            try:
                reply = await self._queue.heartbeat(self.lease.lease, asked_at - self.leased_at)
            except LeaseGone:
                log.warning("attempt %s of %s: the lease is gone; its agent is killed", *self._ids())
                self.drop()
                return
            except QueueRefused as error:
                log.error("attempt %s of %s: %s; its agent is killed", *self._ids(), error)
                self.drop()
                return
            except QueueAway as error:
                log.info("attempt %s of %s: no heartbeat (%s)", *self._ids(), error)
                away = time.monotonic() - self._renewed_at
                if away > (min(ttl, DRAIN_AWAY_SECONDS) if self._draining.is_set() else ttl):
                    # whoever gave the lease has closed it by now, or is no more
                    log.warning("attempt %s of %s: no heartbeat for %.0f s; its agent is killed", *self._ids(), away)
                    self.drop()
                    return
                interval = min(interval, 1.0)
                continue
            self._renewed_at, ttl = asked_at, reply.ttl_seconds
            interval = ttl / BEATS_PER_TTL
            if reply.cancel and not self._cancelled:
                self.cancel()

    async def _until_next_beat(self, seconds: float) -> None:
        """In a worker that is to end: a second at most, so that it soon knows whether the queue is there."""
        if not self._draining.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._draining.wait()
            except TimeoutError:
                return
        await asyncio.sleep(min(seconds, 1.0))

    def _ids(self) -> tuple[str, str]:
        return self.lease.attempt, self.lease.rollout

    def _report(self, end: AgentEnd, has_output: bool) -> Finish:
        agent = self._agent
        known = agent is not None and agent.started.done() and not agent.started.cancelled()
        begun = agent.started.result() if agent is not None and known else self.leased_at
        return Finish(
            attempt=self.lease.attempt,
            ended=cast(EndKind, end.ended),
            exit_code=end.exit_code,
            signal=end.signal,
            message=end.message,
            output=end.output,
            output_truncated=end.output_truncated and has_output,
            log_tail=end.log_tail,
            log_bytes=end.log_bytes,
            seconds=end.seconds,
            start_seconds=max(0.0, begun - self.leased_at),
        )

    async def _excused(self, finish: Finish) -> Finish:
        """An agent that failed where no gateway can be reached did not fail by itself."""
        went_well = finish.ended == "exited" and finish.exit_code == 0
        if went_well or self._gone or finish.ended not in ("exited", "signalled", "deadline"):
            return finish
        why = await self._gateways.cut_off(self.lease.base_url)
        if why is None:
            return finish
        log.warning("attempt %s of %s: %s", *self._ids(), why)
        return finish.model_copy(update={"ended": "cutOff", "message": why[:4096]})

    def _of_loss(self, error: LauncherLost) -> Finish | None:
        if self._config.told_by_its_pod:
            log.warning("attempt %s of %s: %s; its pod says why", *self._ids(), error)
            return None
        if isinstance(error, LauncherKilled):
            return self._finish("signalled", str(error), SIGKILL)
        return self._finish("executorLost", str(error))

    def _finish(self, ended: EndKind, message: str, signal: int | None = None) -> Finish:
        seconds = time.monotonic() - self.leased_at
        return Finish(attempt=self.lease.attempt, ended=ended, signal=signal, message=message[:4096], seconds=seconds)
