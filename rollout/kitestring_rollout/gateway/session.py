"""An open attempt with its effects: the calls in flight, the spans on their way, the fence and the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kitestring_rollout.gateway.attempts import Attempt, State
from kitestring_rollout.gateway.bodies import Holder
from kitestring_rollout.gateway.capture import spoken
from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.prompt_ids import PromptReader
from kitestring_rollout.gateway.retries import Recent
from kitestring_rollout.gateway.token import Claims
from kitestring_rollout.protocol.gateway_admin import EndAttempt, EndedAttempt, FencedAttempt, HeldAttempt, OpenAttempt
from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.encoder import CallEncoder, EncodedSpan, encode_end
from kitestring_rollout.traces.exporter import GroupCommitExporter, SpanLost
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, EndRecord

_log = logging.getLogger(__name__)

NO_HASH = bytes(32)
FLOOD = 2
"""Requests of an attempt that may be read and served at once, as a multiple of its concurrent calls: each may hold a
body in memory, and retries that join a call are no calls."""
MAX_UNDELIVERED_BYTES = 4 << 20
"""Memory that the requests of an attempt's calls may take while their replies wait to be fetched by a retry."""
PAST_DEADLINE_SECONDS = 30.0
"""The exporter says of every span by its deadline, or a little later, what became of it; a fence waits no longer."""
UNSEEN_ACKNOWLEDGEMENTS = 64
"""A callback per span would cost more than a look at so many spans at a time."""


def identity_of(opened: OpenAttempt, epoch: str) -> AttemptIdentity:
    return AttemptIdentity(
        run=opened.run,
        rollout=opened.rollout,
        attempt=opened.attempt,
        group=opened.group,
        task=opened.task,
        step=opened.step,
        mode=opened.mode,
        epoch=epoch,
    )


@dataclass(slots=True, eq=False)
class Session:
    """What the gateway process holds of an attempt from its opening to its end."""

    attempt: Attempt
    identity: AttemptIdentity
    token: str
    claims: Claims
    exporter: GroupCommitExporter
    record_contents: bool
    metrics: Metrics
    flush: Callable[[], None]
    """Makes the records of calls that are over."""
    opened_unix_nano: int = field(default_factory=time.time_ns)
    recent: Recent = field(default_factory=Recent)
    undelivered: dict[int, CallRecord] = field(default_factory=dict)
    """Finished calls whose reply did not reach the agent: a retry may still fetch it, the fence settles the rest."""
    bodies: Holder = field(default_factory=Holder)
    prompts: PromptReader = field(default_factory=PromptReader)
    _encoder: CallEncoder = field(init=False)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    """Connections that are being served: cancelled by the fence."""
    _idle: asyncio.Future[None] | None = None
    _pending: list[asyncio.Future[None]] = field(default_factory=list)
    _look_at: int = UNSEEN_ACKNOWLEDGEMENTS
    fenced_at: float = 0.0
    """When it was last asked to be fenced, in Unix seconds: whoever asks means to end it."""
    _fencing: asyncio.Task[FencedAttempt] | None = None
    _ending: asyncio.Task[EndedAttempt] | None = None
    _end_body: EndAttempt | None = None

    def __post_init__(self) -> None:
        self._encoder = CallEncoder(self.identity, record_contents=self.record_contents)

    def enter(self, task: asyncio.Task[None]) -> None:
        """A connection's task begins to serve a request; Refusal 410 when the attempt is closed, 429 when it serves
        so many that the agent can only be flooding."""
        self.attempt.check_open()
        bound = FLOOD * self.attempt.limits.concurrent_calls
        if len(self._serving) >= bound:
            raise Refusal(429, "concurrent_calls_limit", f"{bound} requests are in flight", kind="limit_exceeded")
        self._serving.add(task)

    def leave(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if self._idle is not None and not self._serving:
            self._idle.set_result(None)
            self._idle = None

    def record(self, record: CallRecord) -> None:
        """Settles a call: its span is encoded and on its way to the collector."""
        nonconforming = bool(record.nonconforming)
        try:
            span = self._encoder.encode(record, self.exporter.contents_room)
        except Exception as bug:  # noqa: BLE001
            self.fail_to_record(record.seq, record.outcome, bug, nonconforming=nonconforming)
            return
        self.attempt.settle(record.seq, span.payload_sha256, record.outcome, nonconforming=nonconforming)
        self._submit(span)
        if record.outcome == "ok":
            self.attempt.hear(spoken(record), trained=record.trained)
        self.metrics.recorded(record)

    def fail_to_record(self, seq: int, outcome: str, bug: Exception, *, nonconforming: bool) -> None:
        """One attempt fails for a record that cannot be made, visibly; the calls of others are recorded nonetheless."""
        attempt = self.attempt
        _log.error("call %d of attempt %s cannot be recorded", seq, self.identity.attempt, exc_info=bug)
        attempt.lose(f"call {seq} cannot be recorded: {type(bug).__name__}: {str(bug)[:500]}")
        attempt.settle(seq, NO_HASH, outcome, nonconforming=nonconforming)

    def can_wait(self, memory: int) -> bool:
        """Whether a call whose request takes `memory` bytes may wait, undelivered, for a retry."""
        held = sum(record.memory_bytes for record in self.undelivered.values())
        return held + memory <= MAX_UNDELIVERED_BYTES

    def deliver_late(self, seq: int) -> None:
        """A retry fetched the reply of a call that had not been delivered."""
        record = self.undelivered.pop(seq, None)
        if record is not None:
            self.record(replace(record, outcome="ok", error=None, status=200, ended_unix_nano=time.time_ns()))

    def _submit(self, span: EncodedSpan) -> None:
        self._pending.append(self.exporter.submit(span))
        if len(self._pending) >= self._look_at:
            self._see_acknowledgements()

    def _see_acknowledgements(self) -> None:
        """Takes note of the spans that are durable or lost by now."""
        waiting = []
        for future in self._pending:
            if not future.done():
                waiting.append(future)
            elif (problem := future.exception()) is not None:
                self.attempt.lose(str(problem))
        self._pending = waiting
        self._look_at = len(waiting) + UNSEEN_ACKNOWLEDGEMENTS

    async def fence(self) -> FencedAttempt:
        """No further call; those in flight are aborted; answers when every span is durable or lost. Idempotent."""
        self.fenced_at = time.time()
        if self._fencing is None:
            self.attempt.begin_fence()
            self._fencing = asyncio.create_task(self._fence())
        return await asyncio.shield(self._fencing)

    async def _fence(self) -> FencedAttempt:
        if self._serving:
            self._idle = asyncio.get_running_loop().create_future()
            for task in self._serving:
                task.cancel()
            await self._idle
        self.flush()
        for record in self.undelivered.values():
            self.record(record)
        self.undelivered.clear()
        self.attempt.finish_fence()
        attempt = self.attempt
        if self._pending:
            self.exporter.hurry()
            _, late = await asyncio.wait(self._pending, timeout=self.exporter.deadline_seconds + PAST_DEADLINE_SECONDS)
            self._see_acknowledgements()
            if late:
                _log.error("attempt %s: %d spans are neither durable nor lost", self.identity.attempt, len(late))
                attempt.lose(f"{len(late)} spans were neither durable nor lost long after their deadline")
        return FencedAttempt(
            attempt=self.identity.attempt,
            epoch=self.identity.epoch,
            n_calls=attempt.n_calls,
            digest=digest(attempt.payload_hashes()),
            lost=attempt.lost,
            calls=attempt.counts(),
            prompt_tokens=attempt.prompt_tokens,
            completion_tokens=attempt.completion_tokens,
            rewards=tuple(attempt.rewards.posted.values()),
            last_message=attempt.last_message,
        )

    @property
    def ended_with(self) -> EndAttempt | None:
        """The body of the end that was written, or is being written."""
        return self._end_body

    async def end(self, body: EndAttempt) -> EndedAttempt:
        """Writes `rollout.end`; the attempt must be fenced. SpanLost when it could not be made durable: may be
        called again."""
        if self._ending is None:
            self._end_body = body
            self._ending = asyncio.create_task(self._end(body))
        ending = self._ending
        try:
            return await asyncio.shield(ending)
        except SpanLost:
            if self._ending is ending:
                self._ending = self._end_body = None
            raise

    async def _end(self, body: EndAttempt) -> EndedAttempt:
        attempt, identity = self.attempt, self.identity
        ended = EndedAttempt(
            attempt=identity.attempt,
            epoch=identity.epoch,
            n_calls=attempt.n_calls,
            digest=digest(attempt.payload_hashes()),
        )
        record = EndRecord(
            identity=identity,
            n_calls=ended.n_calls,
            digest=ended.digest,
            outcome=body.outcome,
            started_unix_nano=self.opened_unix_nano,
            ended_unix_nano=time.time_ns(),
            reason=body.reason,
            reward=body.reward,
            reward_source=body.reward_source,
            exit_code=body.exit_code,
            seconds=body.seconds,
            output=body.output,
            calls=attempt.counts(),
        )
        await self.exporter.submit(encode_end(record, record_contents=self.record_contents), urgent=True)
        attempt.end()
        return ended

    def as_held(self) -> HeldAttempt:
        identity = self.identity
        return HeldAttempt(
            run=identity.run,
            rollout=identity.rollout,
            attempt=identity.attempt,
            group=identity.group,
            step=identity.step,
            mode=self.attempt.opened.mode,
            state=self.attempt.state.value,
            opened_unix_nano=self.opened_unix_nano,
            expires_unix=self.attempt.expires,
        )

    @property
    def serving(self) -> int:
        """Requests that are being read or answered."""
        return len(self._serving)

    @property
    def open(self) -> bool:
        return self.attempt.state is State.OPEN

    @property
    def fenced(self) -> bool:
        return self.attempt.state in (State.FENCED, State.ENDED)
