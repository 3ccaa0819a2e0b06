"""The parts of a run for one rollout, in this process: collector, gateway, queue and worker, as a run has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import MODE_TRY
from kitestring_cli.run.configs import PartConfigs
from kitestring_rollout.collector.app import Collector, Credentials
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.gateway.app import running
from kitestring_rollout.protocol.gateway_admin import FencedAttempt
from kitestring_rollout.protocol.queue import Finish
from kitestring_rollout.protocol.run_status import RunStatus
from kitestring_rollout.storage import ObjectStore, open_store
from kitestring_rollout.traces.attempts import LostAttempt, ProvenAttempt
from kitestring_rollout.traces.reader import TraceReader
from kitestring_rollout.traces.records import CallRecord
from kitestring_rollout.worker.main import WorkerMistake, work
from kitestring_trainer.config import TrainerConfig, read_credential
from kitestring_trainer.plan import PlannedGroup, StepPlan
from kitestring_trainer.queue.closing import Scored, Scorer
from kitestring_trainer.queue.rollouts import RolloutResult
from kitestring_trainer.queue.scoring import make_scorer
from kitestring_trainer.queue.state import Tries
from kitestring_trainer.queue.thread import QueueSettings, QueueThread
from kitestring_trainer.queue.traces import TraceProofs
from kitestring_trainer.tasks import Task, TaskSet

LOOK_SECONDS = 0.1
"""Between two looks for new calls."""
LAST_LOOKS = 20

Said = Callable[[CallRecord, Sequence[CallRecord]], None]
"""(call, the calls before it): called once for each call, as soon as its trace is there."""


@dataclass
class Played:
    """What became of the rollout. `finish` and `scored` are None where it never came so far."""

    result: RolloutResult
    attempt: ProvenAttempt | LostAttempt | None
    calls: tuple[CallRecord, ...]
    finish: Finish | None
    scored: Scored | None


@dataclass
class _Witness:
    """Sees what the queue only passes on."""

    score: Scorer
    finish: Finish | None = None
    scored: Scored | None = None

    async def __call__(self, klass: str, task: Task, finish: Finish | None, fenced: FencedAttempt) -> Scored:
        self.finish = finish
        self.scored = await self.score(klass, task, finish, fenced)
        return self.scored


def plan_for(row: int) -> StepPlan:
    """One group of one rollout of the task in `row`."""
    group = f"y{0:06d}-{row:08d}"
    return StepPlan(MODE_TRY, 0, (PlannedGroup(group, row, row, (f"{group}-000",)),))


async def play(configs: PartConfigs, row: int, tasks: TaskSet, said: Said) -> Played:
    """Run the one rollout to its end. Raises UserMistakeError; when cancelled, no process of the agent is left."""
    store = open_store(configs.collector.store)
    trainer = configs.trainer
    witness = _Witness(make_scorer(trainer.pool, trainer.working_folder, trainer.scorer_service))
    live = _Live(store, said)
    async with _collecting(configs.collector, store), running(configs.gateway):
        queue = QueueThread(_settings(configs.trainer), witness, TraceProofs(store, time.time()), _status)
        await asyncio.to_thread(queue.start)
        worker = asyncio.create_task(_work(configs))
        try:
            plan = queue.submit(queue.queue.run_plan(plan_for(row), tasks, accepted=None))
            results = asyncio.wrap_future(plan)
            while not results.done():
                either: set[asyncio.Future[Any]] = {results, worker}
                await asyncio.wait(either, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.to_thread(live.look)
                if worker.done() and not results.done():
                    queue.fail(worker.exception() or RuntimeError("the worker ended before the rollout"))
            (result,) = await results
            for _ in range(LAST_LOOKS):
                if live.attempt is not None:
                    break
                await asyncio.sleep(LOOK_SECONDS)
                await asyncio.to_thread(live.look)
        except BaseException:
            worker.cancel()  # it kills its agent; otherwise it would hear of the end with its next heartbeat
            raise
        finally:
            await asyncio.to_thread(queue.close)
            # What the worker raised has failed the plan, which raised it.
            await asyncio.gather(worker, return_exceptions=True)
    return Played(result, live.attempt, live.calls, witness.finish, witness.scored)


@dataclass
class _Live:
    """Tells of each call of the attempt as its trace appears."""

    store: ObjectStore
    said: Said
    attempt: ProvenAttempt | LostAttempt | None = None
    calls: tuple[CallRecord, ...] = ()
    _reader: TraceReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = TraceReader(self.store, grace_seconds=1.0, contents=True)

    def look(self) -> None:
        for decided in self._reader.poll():
            self.attempt = decided
            self._tell(decided, final=True)
        if self.attempt is None:
            for undecided in self._reader.undecided():
                self._tell(undecided, final=False)

    def _tell(self, attempt: ProvenAttempt | LostAttempt, *, final: bool) -> None:
        """In the order of the numbers: while the attempt goes on, a call that ended early waits for those before it."""
        calls = attempt.calls()
        told = {call.seq for call in self.calls}
        for place, call in enumerate(calls):
            if call.seq in told:
                continue
            if call.seq != place + 1 and not final:
                break
            self.said(call, calls[:place])
            self.calls = (*self.calls, call)


@asynccontextmanager
async def _collecting(config: CollectorConfig, store: ObjectStore) -> AsyncIterator[None]:
    agents = config.agent_credential_file
    credentials = Credentials(
        read_credential(config.credential_file), read_credential(agents) if agents is not None else None
    )
    runner = web.AppRunner(Collector(config, store, credentials).application(), access_log=None, auto_decompress=False)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.listen.host, config.listen.port).start()
        except OSError as error:
            taken = f"the collector cannot listen on {config.listen.host}:{config.listen.port}"
            raise UserMistakeError(f"{taken}: {error.strerror}; try again, another port will be chosen") from error
        yield
    finally:
        await runner.cleanup()


def _settings(config: TrainerConfig) -> QueueSettings:
    return QueueSettings(
        rules=replace(config.rules, tries=Tries(total=1)),
        host=config.queue.host,
        port=config.queue.port,
        credential=read_credential(config.queue_credential_file),
        gateways=config.gateways,
        gateway_credential=read_credential(config.gateway_credential_file),
        gateway_gone_seconds=config.timing.gateway_gone,
        poll_seconds=config.timing.poll,
    )


async def _work(configs: PartConfigs) -> None:
    try:
        await work(configs.workers[0], lambda _: None)
    except WorkerMistake as error:
        raise UserMistakeError(str(error)) from error


def _status() -> RunStatus:
    """For the queue's status route, which nobody asks here."""
    return RunStatus(run="try", phase="RollingOut", step=0, steps=1, incarnation=1, unix_time=time.time())
