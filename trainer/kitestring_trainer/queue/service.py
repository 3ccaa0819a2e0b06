"""The rollout queue in its event loop: leases out, attempts closed and proven, until every rollout has ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uuid_utils

from kitestring_api.names import CLASS_INFRASTRUCTURE, CLASS_INVALID_TASK
from kitestring_rollout.protocol.gateway_admin import OpenAttempt
from kitestring_rollout.protocol.queue import Finish, FinishReply, Lease
from kitestring_trainer.errors import RunFailedError, RunStoppedError, UserMistakeError
from kitestring_trainer.incarnations import STOPPED
from kitestring_trainer.plan import PlannedGroup, StepPlan
from kitestring_trainer.queue.closing import Scorer, close_attempt
from kitestring_trainer.queue.executors import pod_problem
from kitestring_trainer.queue.gateways import Gateways, NoGatewayError
from kitestring_trainer.queue.proofs import Disproof, Proof, ProofWatch
from kitestring_trainer.queue.rollouts import QueueRules, Restored, RolloutResult
from kitestring_trainer.queue.settlement import Settlements
from kitestring_trainer.queue.state import AttemptClosedError, Ending, Entry, Phase, QueueState, final_of
from kitestring_trainer.queue.verdict import executor_finish, judge
from kitestring_trainer.tasks import Task, TaskSet

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

LEAVE_SECONDS = 5.0
"""How long a queue that closes waits for gateways to end what is still open. What they do not end in time the next
trainer ends, if there is one; meanwhile a gateway that is to end as well waits for it."""


class QueueClosedError(Exception):
    """The run has ended: executors end too (410)."""


@dataclass(slots=True)
class _Running:
    """A plan in progress."""

    plan: StepPlan
    entries: list[Entry]
    tasks: TaskSet
    accepted: Callable[[str], bool] | None
    left: int
    proofs: dict[str, Proof]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RolloutQueue:
    """All methods run in one event loop; `proof_found` and `watch_broke` may be called from any thread."""

    def __init__(
        self, rules: QueueRules, gateways: Gateways, score: Scorer, make_watch: Callable[[RolloutQueue], ProofWatch]
    ) -> None:
        self.rules = rules
        self._gateways = gateways
        self._score = score
        self._loop = asyncio.get_running_loop()
        self._state = QueueState(
            tries=rules.tries,
            ttl_seconds=rules.lease_seconds,
            new_attempt=lambda: str(uuid_utils.uuid7()),
            new_lease=lambda: secrets.token_urlsafe(24),
        )
        self._plans: dict[str, _Running] = {}
        self._of_rollout: dict[str, _Running] = {}
        self._finishing: dict[str, asyncio.Task[FinishReply]] = {}
        self._changed = asyncio.Condition()
        self._background: set[asyncio.Task[Any]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._ended = False
        self._failure: BaseException | None = None
        self._start_failures = 0
        self._started = False
        self.retried = 0
        """Attempts after a rollout's first, whole run."""
        self._watch = make_watch(self)
        self._settlements = Settlements(self._watch, self._settle, rules.proof_seconds)
        self._ticker = self._loop.create_task(self._tick(), name="queue-ticker")

    # --- the trainer's side ---

    async def run_plan(
        self,
        plan: StepPlan,
        tasks: TaskSet,
        *,
        accepted: Callable[[str], bool] | None,
        restored: Mapping[str, Restored] | None = None,
    ) -> list[RolloutResult]:
        """Have every rollout of the plan run to its end; the results are in the order of the plan.

        `accepted` says which policy versions a trained token may come from (None: any). The plan must be durable
        already. Raises RunFailedError or UserMistakeError when the rollouts cannot be run at all.
        """
        self._check_alive()
        known = restored or {}
        entries = [
            _entry(plan, group, rollout, self._problem(tasks, group.task), known.get(rollout))
            for group in plan.groups
            for rollout in group.rollouts
        ]
        self.retried += sum(max(0, before.counts.total() - 1) for before in known.values())
        proofs = {rollout: before.proof for rollout, before in known.items() if before.proof is not None}
        left = sum(entry.phase is not Phase.FINAL for entry in entries)
        running = _Running(plan, entries, tasks, accepted, left, proofs)
        self._plans[plan.name] = running
        self._of_rollout.update((entry.rollout, running) for entry in entries)
        self._state.add(entries)
        try:
            if left:
                await self._notify()
                await running.done
        finally:
            self._remove(running)
        return [_result(entry, running) for entry in entries]

    def _problem(self, tasks: TaskSet, row: int) -> str | None:
        return tasks.problem(row) or pod_problem(tasks.task(row), self.rules.per_task)

    def _remove(self, running: _Running) -> None:
        del self._plans[running.plan.name]
        for entry in running.entries:
            if entry.attempt is not None:
                self._settlements.drop(entry.attempt)
            del self._of_rollout[entry.rollout]
        self._state.remove(running.plan.rollouts)

    async def close(self) -> None:
        """End the run: every executor is told (410), what is still leased is ended at its gateway, what is being closed
        gets its end."""
        self._ended = True
        self.fail(RunStoppedError("the rollout queue has closed"))
        await self._notify()
        ending = {*self._leaving, *self._finishing.values()}
        if ending:
            await asyncio.wait(ending, timeout=LEAVE_SECONDS)
        self._ticker.cancel()
        await asyncio.to_thread(self._watch.stop)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(self._ticker, *self._background, return_exceptions=True)

    def fail(self, error: BaseException) -> None:
        """Every plan in progress ends with this error; nobody will hear how the agents that still run end."""
        self._failure = self._failure or error
        for running in self._plans.values():
            if not running.done.done():
                running.done.set_exception(error)
                self._leave(running.entries)

    def _leave(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.phase is Phase.LEASED and entry.place is not None and entry.attempt is not None:
                task = self.spawn(self._gateways.abandon(entry.place, entry.attempt, STOPPED))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    def counts(self) -> Mapping[Phase, int]:
        """Rollouts of the plans in progress by phase. From any thread: the list is taken at once."""
        return Counter(entry.phase for entry in list(self._state.entries()))

    # --- the executors' side ---

    async def lease(
        self, executor: str, capacity: int, wait_seconds: float, rollout: str | None = None
    ) -> Sequence[Lease]:
        """Up to `capacity` opened attempts, or this one `rollout`; waits for the first for `wait_seconds`.

        When the caller goes away meanwhile, what was opened for it goes back into the line. Raises QueueClosedError,
        and LookupError for a rollout that is not in the queue or has ended.
        """
        give_up = time.monotonic() + wait_seconds
        while True:
            self._check_open()
            opening = self.spawn(self._open_some(self._take(capacity, rollout), executor))
            try:
                leases = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(self._take_back)
                raise
            left = give_up - time.monotonic()
            if leases or left <= 0:
                return leases
            await self._wait_for_work(left, rollout)

    async def _wait_for_work(self, seconds: float, rollout: str | None) -> None:
        def due() -> bool:
            return self._ended or self._state.waiting(time.monotonic(), rollout)

        async with self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(due)
            except TimeoutError:
                return

    def _take(self, capacity: int, rollout: str | None) -> list[Entry]:
        now = time.monotonic()
        if rollout is None:
            return self._state.take(capacity, now)
        one = self._state.take_one(rollout, now)
        return [] if one is None else [one]

    async def _open_some(self, taken: Sequence[Entry], executor: str) -> Sequence[Lease]:
        plans = [(entry, self._of_rollout.get(entry.rollout)) for entry in taken]
        opening = [
            self._open_one(entry, entry.attempt or "", running, executor)
            for entry, running in plans
            if running is not None  # its plan has ended since it was taken
        ]
        return [lease for lease in await asyncio.gather(*opening) if lease is not None]

    def _take_back(self, opening: asyncio.Task[Sequence[Lease]]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            return
        for lease in opening.result():
            entry = self._state.of_attempt(lease.attempt)
            if entry is None or entry.place is None:
                continue
            place = entry.place
            self._state.undelivered(lease.lease)
            self._gateways.released(place)
            self.spawn(self._gateways.abandon(place, lease.attempt))
        self.spawn(self._notify())

    async def _open_one(self, entry: Entry, attempt: str, running: _Running, executor: str) -> Lease | None:
        rules = self.rules
        request = OpenAttempt(
            run=rules.run,
            rollout=entry.rollout,
            attempt=attempt,
            group=entry.group,
            task=entry.task,
            step=entry.step,
            mode=entry.mode,
            limits=rules.limits,
            reward=rules.reward,
            lifetime_seconds=rules.deadline_seconds + rules.overtime_seconds + 2 * rules.lease_seconds,
        )
        try:
            place, opened = await self._gateways.open(request)
        except NoGatewayError as error:
            logger.warning("no gateway opens an attempt for %s: %s", entry.rollout, error)
            self._state.not_opened(attempt, time.monotonic() + rules.reopen_seconds)
            return None
        except RunFailedError as error:
            self.fail(error)
            return None
        leased = self._state.opened(attempt, place, executor, time.monotonic())
        if leased is None:
            self._gateways.released(place)
            return None
        if entry.counts.total():
            self.retried += 1
        assert leased.lease is not None
        return Lease(
            lease=leased.lease,
            rollout=entry.rollout,
            attempt=attempt,
            group=entry.group,
            step=entry.step,
            mode=entry.mode,
            task_index=entry.task,
            task=running.tasks.task(entry.task).visible,
            base_url=opened.base_url,
            token=opened.token,
            traceparent=opened.traceparent,
            model=rules.model,
            ttl_seconds=rules.lease_seconds,
            deadline_seconds=rules.deadline_seconds,
        )

    def rollout_of_lease(self, lease: str) -> str | None:
        """The rollout that is leased under this secret; None for one that is over or never was."""
        return self._state.rollout_of_lease(lease)

    def heartbeat(self, lease: str) -> bool:
        """Keep the lease; True when the executor is to end its agent. Raises LeaseGoneError, QueueClosedError."""
        self._check_open()
        return self._state.heartbeat(lease, time.monotonic(), self.rules.deadline_seconds + self.rules.overtime_seconds)

    async def finish(self, lease: str, finish: Finish) -> FinishReply:
        """Close the attempt and say what it counts as so far. The same message twice at once is answered twice.

        Raises AttemptClosedError, QueueClosedError.
        """
        self._check_open()
        key = f"{lease}/{finish.attempt}"
        closing = self._finishing.get(key)
        if closing is None:
            entry = self._state.finish(lease, finish.attempt)
            self._note_start(finish)
            closing = self.spawn(self._close(entry, finish))
            self._finishing[key] = closing
            closing.add_done_callback(lambda _: self._finishing.pop(key))
        return await asyncio.shield(closing)

    def wanted(self, limit: int) -> list[tuple[Entry, Task]]:
        """The first rollouts that wait for an executor of their own, each with its task. Raises QueueClosedError."""
        self._check_open()
        entries = self._state.wanted(time.monotonic())[:limit]
        return [(entry, self._of_rollout[entry.rollout].tasks.task(entry.task)) for entry in entries]

    def lost(self, rollout: str, number: int, klass: str, message: str) -> bool:
        """The executor of attempt `number` of a rollout ended without a finish; `klass` is what the cluster makes of
        it. False when that attempt is over already. Raises QueueClosedError.
        """
        self._check_open()
        entry = self._state.lost(rollout, number)
        if entry is not None:
            assert entry.attempt is not None
            logger.warning("executor %s of %s lost: %s: %s", entry.executor, rollout, klass, message)
            self.spawn(self._close(entry, executor_finish(entry.attempt, klass, message)))
            return True
        if klass != CLASS_INVALID_TASK:  # an attempt that was never leased had no agent that could have failed
            klass = CLASS_INFRASTRUCTURE
        retry_at = time.monotonic() + self.rules.retry_seconds * 2 ** (number - 1)
        entry = self._state.not_begun(rollout, number, Ending(klass, message), retry_at)
        if entry is None:
            return False
        logger.warning("no executor for %s, try %d: %s: %s", rollout, number, klass, message)
        self._note_final(entry)
        return True

    def _note_start(self, finish: Finish) -> None:
        """An agent that cannot start anywhere is the user's to mend: not a storm of retries."""
        if finish.ended == "cutOff":  # it may not have been started
            return
        if finish.ended != "startFailed":
            self._started = True
            return
        self._start_failures += 1
        if not self._started and self._start_failures >= self.rules.tries.total:
            cause = finish.message or finish.log_tail or "no cause given"
            self.fail(UserMistakeError(f"the agent cannot start ({self._start_failures} tries, none started): {cause}"))

    # --- ends of attempts ---

    async def _close(self, entry: Entry, finish: Finish | None) -> FinishReply:
        attempt, place = entry.attempt, entry.place
        running = self._of_rollout.get(entry.rollout)
        if attempt is None or place is None or running is None:
            raise AttemptClosedError(attempt or entry.rollout)
        self._settlements.begin(attempt)
        try:
            closed = await close_attempt(
                self._gateways,
                self._score,
                place,
                attempt,
                task=running.tasks.task(entry.task),
                finish=finish,
                deadline_seconds=self.rules.deadline_seconds,
                reward_rule=self.rules.reward,
            )
        except RunFailedError as error:
            self.fail(error)
            raise AttemptClosedError(attempt) from error
        finally:
            self._gateways.released(place)
        if not self._state.closed(attempt):  # its plan is gone
            self._settlements.drop(attempt)
            raise AttemptClosedError(attempt)
        counts = Counter(entry.counts) + Counter([closed.klass])
        self._settlements.closed(attempt, closed)
        retry = not self.rules.tries.exhausted(counts, closed.klass)
        return FinishReply(outcome=closed.klass, reward=closed.reward, retry=retry)

    def _settle(self, attempt: str, settled: Proof | Ending) -> None:
        entry = self._state.of_attempt(attempt)
        if entry is None:
            return
        running = self._of_rollout[entry.rollout]
        ending = judge(settled.end, settled.calls, running.accepted) if isinstance(settled, Proof) else settled
        retry_at: float | None = None
        if ending.klass == CLASS_INFRASTRUCTURE:
            logger.warning("attempt %s of %s: %s", attempt, entry.rollout, ending.reason)
            retry_at = time.monotonic() + self.rules.retry_seconds * 2 ** entry.counts[CLASS_INFRASTRUCTURE]
        self._state.settle(attempt, ending, retry_at)
        if entry.final is None:
            self.spawn(self._notify())
            return
        if isinstance(settled, Proof):
            running.proofs[entry.rollout] = settled
        self._note_final(entry)

    def _note_final(self, entry: Entry) -> None:
        """A plan of which every rollout has ended is done."""
        if entry.final is None:
            return
        running = self._of_rollout[entry.rollout]
        running.left -= 1
        if running.left == 0 and not running.done.done():
            running.done.set_result(None)

    def proof_found(self, item: Proof | Disproof) -> None:
        """From the proof watch's thread."""
        self._loop.call_soon_threadsafe(self._found, item)

    def _found(self, item: Proof | Disproof) -> None:
        try:
            self._settlements.found(item)
        except Exception as error:  # noqa: BLE001  the callback's boundary: the run ends with this error
            self.fail(error)

    def watch_broke(self, error: BaseException) -> None:
        """From the proof watch's thread."""
        self._loop.call_soon_threadsafe(self.fail, error)

    # --- time ---

    async def _tick(self) -> None:
        """Expire leases, give up on proofs, wake executors for delayed rollouts."""
        rules = self.rules
        pause = min(1.0, rules.lease_seconds / 4, rules.proof_seconds / 4, rules.reopen_seconds, rules.retry_seconds)
        try:
            while True:
                await asyncio.sleep(pause)
                now = time.monotonic()
                for entry in self._state.expire(now):
                    logger.warning("executor %s lost: the lease of %s expired", entry.executor, entry.rollout)
                    self.spawn(self._close(entry, None))
                self._settlements.give_up()
                if self._state.waiting(now):
                    await self._notify()
        except Exception as error:  # noqa: BLE001  the task's boundary: the run ends with this error
            self.fail(error)

    # --- inside ---

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def spawn(self, work: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        """Run `work` whatever becomes of the request that caused it; a bug in it ends the plans in progress."""
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AttemptClosedError):
            self.fail(error)

    def _check_open(self) -> None:
        if self._ended:
            raise QueueClosedError

    def _check_alive(self) -> None:
        self._check_open()
        if self._failure is not None:
            raise self._failure


def _entry(plan: StepPlan, group: PlannedGroup, rollout: str, problem: str | None, before: Restored | None) -> Entry:
    entry = Entry(rollout=rollout, group=group.group, step=plan.step, mode=plan.mode, task=group.task)
    if problem is not None:
        entry.phase = Phase.FINAL
        entry.final = final_of(rollout, CLASS_INVALID_TASK, f"row {group.task} {problem}")
    elif before is not None:
        entry.counts = Counter(before.counts)
        entry.final = before.final
        entry.phase = Phase.WAITING if before.final is None else Phase.FINAL
    return entry


def _result(entry: Entry, running: _Running) -> RolloutResult:
    assert entry.final is not None
    return RolloutResult(entry.rollout, entry.group, entry.task, entry.final, running.proofs.get(entry.rollout))
