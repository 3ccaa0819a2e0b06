"""The rollout queue as a pure state machine: no clock, no network; time and new ids are passed in.

A rollout goes WAITING → OPENING → LEASED → CLOSING → PROVING and then back to WAITING (another attempt) or to FINAL.
An attempt is opened once, leased to one executor under one secret, closed once, and proven or lost once; the next
attempt of its rollout cannot begin before. A message that comes late, twice or out of order changes nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from kitestring_api.names import (
    CLASS_AGENT_FAILED,
    CLASS_INVALID_TASK,
    CLASS_SUCCEEDED,
    CLASS_TIMED_OUT,
)
from kitestring_rollout.protocol.gateway_admin import Mode


class Phase(Enum):
    WAITING = auto()
    OPENING = auto()
    LEASED = auto()
    CLOSING = auto()
    PROVING = auto()
    FINAL = auto()


@dataclass(frozen=True, slots=True)
class Tries:
    """How many attempts a rollout may take (RolloutPool `spec.attempts`)."""

    total: int = 3
    agent_failed: int = 1
    timed_out: int = 1

    def exhausted(self, counts: Counter[str], last: str) -> bool:
        """Whether the attempt that just ended in class `last` (counted in `counts`) was the last one."""
        if last in (CLASS_SUCCEEDED, CLASS_INVALID_TASK):
            return True
        limit = {CLASS_AGENT_FAILED: self.agent_failed, CLASS_TIMED_OUT: self.timed_out}.get(last, self.total)
        return counts[last] >= limit or counts.total() >= self.total


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt was opened."""

    gateway: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How one attempt ended. `epoch`, `n_calls` and `digest` are those of its proof; a lost attempt has none."""

    klass: str
    reason: str | None = None
    reward: float | None = None
    reward_source: str | None = None
    epoch: str | None = None
    n_calls: int | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """What became of a rollout: the ending of its last attempt. `attempt` is None when none was made."""

    rollout: str
    attempt: str | None
    ending: Ending
    tries: int


@dataclass(slots=True)
class Entry:
    """A rollout in the queue. Read it outside this module, never write it."""

    rollout: str
    group: str
    step: int
    mode: Mode
    task: int
    phase: Phase = Phase.WAITING
    attempt: str | None = None
    lease: str | None = None
    place: Place | None = None
    expires: float = 0.0
    leased_at: float = 0.0
    executor: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    final: Final | None = None

    @property
    def number(self) -> int:
        """Which attempt of the rollout the present one is, or the next one will be: from 1."""
        return self.counts.total() + 1


class LeaseGoneError(Exception):
    """The lease is unknown or over (410)."""


class AttemptClosedError(Exception):
    """The attempt was closed already, or is being closed for another reason (409)."""


class QueueState:
    """Every rollout of the plans in progress. All times are seconds of one monotonic clock."""

    def __init__(
        self, *, tries: Tries, ttl_seconds: float, new_attempt: Callable[[], str], new_lease: Callable[[], str]
    ) -> None:
        self.tries = tries
        self.ttl_seconds = ttl_seconds
        self._new_attempt = new_attempt
        self._new_lease = new_lease
        self._entries: dict[str, Entry] = {}
        self._attempts: dict[str, Entry] = {}
        self._leases: dict[str, Entry] = {}
        self._ready: deque[str] = deque()
        self._delayed: list[tuple[float, str]] = []

    # --- plans ---

    def add(self, entries: Iterable[Entry]) -> None:
        """Put rollouts of a plan in line; entries that are FINAL already (invalid tasks, resumed ones) are only kept.

        Raises ValueError for a rollout that is in the queue.
        """
        for entry in entries:
            if entry.rollout in self._entries:
                raise ValueError(f"rollout {entry.rollout} is in the queue already")
            self._entries[entry.rollout] = entry
            if entry.phase is Phase.WAITING:
                self._ready.append(entry.rollout)

    def remove(self, rollouts: Iterable[str]) -> list[Entry]:
        """Take rollouts out, whatever their phase; their leases and attempts are gone from now on."""
        removed = []
        for rollout in rollouts:
            entry = self._entries.pop(rollout, None)
            if entry is None:
                continue
            self._forget(entry)
            removed.append(entry)
        return removed

    def entry(self, rollout: str) -> Entry:
        return self._entries[rollout]

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    def of_attempt(self, attempt: str) -> Entry | None:
        """The rollout whose current attempt this is."""
        return self._attempts.get(attempt)

    # --- executors ---

    def take(self, limit: int, now: float) -> list[Entry]:
        """Up to `limit` waiting rollouts, each with a new attempt id, for the caller to open at a gateway."""
        self._wake(now)
        taken: list[Entry] = []
        while self._ready and len(taken) < limit:
            entry = self._entries.get(self._ready.popleft())
            if entry is None or entry.phase is not Phase.WAITING:
                continue
            taken.append(self._begin(entry))
        return taken

    def take_one(self, rollout: str, now: float) -> Entry | None:
        """This rollout with a new attempt id, if it waits for an executor. LookupError when it never will again."""
        entry = self._entries.get(rollout)
        if entry is None or entry.phase is Phase.FINAL:
            raise LookupError(rollout)
        self._wake(now)
        if rollout not in self._ready:
            return None
        self._ready = deque(waiting for waiting in self._ready if waiting != rollout)
        return self._begin(entry)

    def wanted(self, now: float) -> list[Entry]:
        """Rollouts that wait for an executor, in the order in which they are to start."""
        self._wake(now)
        entries = (self._entries.get(rollout) for rollout in self._ready)
        return [entry for entry in entries if entry is not None and entry.phase is Phase.WAITING]

    def _wake(self, now: float) -> None:
        """What was to wait until now stands at the head of the line."""
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.appendleft(heapq.heappop(self._delayed)[1])

    def _begin(self, entry: Entry) -> Entry:
        entry.phase = Phase.OPENING
        entry.attempt = self._new_attempt()
        self._attempts[entry.attempt] = entry
        return entry

    def opened(self, attempt: str, place: Place, executor: str, now: float) -> Entry | None:
        """The attempt is open; lease it. None when its rollout was removed meanwhile."""
        entry = self._in_phase(attempt, Phase.OPENING)
        if entry is None:
            return None
        entry.phase = Phase.LEASED
        entry.place = place
        entry.lease = self._new_lease()
        entry.executor = executor
        entry.leased_at = now
        entry.expires = now + self.ttl_seconds
        self._leases[entry.lease] = entry
        return entry

    def not_opened(self, attempt: str, retry_at: float) -> None:
        """No gateway opened the attempt: nobody ever had it, so it counts as no try. Taken again from `retry_at` on."""
        entry = self._in_phase(attempt, Phase.OPENING)
        if entry is not None:
            self._forget(entry)
            entry.phase = Phase.WAITING
            heapq.heappush(self._delayed, (retry_at, entry.rollout))

    def undelivered(self, lease: str) -> None:
        """The executor went away before it got this lease: nobody ever had the attempt, so it counts as no try."""
        entry = self._leases.get(lease)
        if entry is not None and entry.phase is Phase.LEASED:
            self._forget(entry)
            entry.phase = Phase.WAITING
            self._ready.appendleft(entry.rollout)

    def rollout_of_lease(self, lease: str) -> str | None:
        entry = self._leases.get(lease)
        return None if entry is None else entry.rollout

    def heartbeat(self, lease: str, now: float, longest: float) -> bool:
        """Keep the lease for another ttl; True when it has lasted longer than `longest` seconds: then it is kept no
        further and the executor is to end its agent.

        Raises LeaseGoneError when the executor must end its agent and report nothing.
        """
        entry = self._leases.get(lease)
        if entry is None or entry.phase is not Phase.LEASED:
            raise LeaseGoneError(lease)
        if now - entry.leased_at > longest:
            return True
        entry.expires = now + self.ttl_seconds
        return False

    def finish(self, lease: str, attempt: str) -> Entry:
        """The executor says that the agent has ended: the caller is to close the attempt.

        Raises AttemptClosedError when the attempt is closed or closing, or was never leased under this secret.
        """
        entry = self._leases.get(lease)
        if entry is None or entry.attempt != attempt or entry.phase is not Phase.LEASED:
            raise AttemptClosedError(attempt)
        entry.phase = Phase.CLOSING
        return entry

    def expire(self, now: float) -> list[Entry]:
        """Leases whose executor was silent for too long: their attempts are to be closed by the caller."""
        silent = [entry for entry in self._leases.values() if entry.phase is Phase.LEASED and now >= entry.expires]
        for entry in silent:
            entry.phase = Phase.CLOSING
        return silent

    def lost(self, rollout: str, number: int) -> Entry | None:
        """The executor of attempt `number` ended without a finish. The entry, if its attempt is leased: it is CLOSING
        now and the caller is to close it. None: it is over, or never began.
        """
        entry = self._entries.get(rollout)
        if entry is None or entry.phase is not Phase.LEASED or entry.number != number:
            return None
        entry.phase = Phase.CLOSING
        return entry

    def not_begun(self, rollout: str, number: int, ending: Ending, retry_at: float) -> Entry | None:
        """The executor that attempt `number` was meant for ended before it leased anything: that counts as a try.

        None when the rollout waits for no such attempt.
        """
        entry = self._entries.get(rollout)
        if entry is None or entry.phase is not Phase.WAITING or entry.number != number:
            return None
        entry.counts[ending.klass] += 1
        if self.tries.exhausted(entry.counts, ending.klass):
            entry.phase = Phase.FINAL
            entry.final = Final(rollout, None, ending, entry.counts.total())
        else:
            self._ready = deque(waiting for waiting in self._ready if waiting != rollout)
            self._delayed = [(at, waiting) for at, waiting in self._delayed if waiting != rollout]
            heapq.heapify(self._delayed)
            heapq.heappush(self._delayed, (retry_at, rollout))
        return entry

    def waiting(self, now: float, rollout: str | None = None) -> bool:
        """Whether `take`, or `take_one` of this rollout, would not be in vain."""
        if rollout is not None:
            entry = self._entries.get(rollout)
            self._wake(now)
            return entry is None or entry.phase is Phase.FINAL or rollout in self._ready
        return bool(self._ready) or bool(self._delayed and self._delayed[0][0] <= now)

    # --- ends of attempts ---

    def closed(self, attempt: str) -> bool:
        """The gateway confirmed the close (or its epoch is gone); the proof is awaited. False for a stale message."""
        entry = self._in_phase(attempt, Phase.CLOSING)
        if entry is None:
            return False
        entry.phase = Phase.PROVING
        return True

    def settle(self, attempt: str, ending: Ending, retry_at: float | None = None) -> Entry | None:
        """The attempt has ended for good: proven complete, or lost. Only for one that is CLOSING or PROVING.

        The rollout becomes FINAL, or waits for its next attempt: at the head of the line, or from `retry_at` on. None
        for a stale message.
        """
        entry = self._attempts.get(attempt)
        if entry is None or entry.phase not in (Phase.CLOSING, Phase.PROVING):
            return None
        entry.counts[ending.klass] += 1
        self._forget(entry)
        if self.tries.exhausted(entry.counts, ending.klass):
            entry.phase = Phase.FINAL
            entry.final = Final(entry.rollout, attempt, ending, entry.counts.total())
        else:
            entry.phase = Phase.WAITING
            if retry_at is None:
                self._ready.appendleft(entry.rollout)
            else:
                heapq.heappush(self._delayed, (retry_at, entry.rollout))
        return entry

    # --- inside ---

    def _in_phase(self, attempt: str, phase: Phase) -> Entry | None:
        entry = self._attempts.get(attempt)
        return entry if entry is not None and entry.phase is phase else None

    def _forget(self, entry: Entry) -> None:
        """Its attempt and lease are over."""
        if entry.attempt is not None:
            self._attempts.pop(entry.attempt, None)
        if entry.lease is not None:
            self._leases.pop(entry.lease, None)
        entry.attempt = entry.lease = entry.place = None


def final_of(rollout: str, klass: str, reason: str | None) -> Final:
    """A rollout that ends without an attempt."""
    return Final(rollout, None, Ending(klass, reason), 0)


def replay(rollout: str, endings: Iterable[tuple[str, Ending]], tries: Tries) -> tuple[Counter[str], Final | None]:
    """What a queue would know of a rollout after attempts that ended so, in order: tries used, and its end if any."""
    counts: Counter[str] = Counter()
    for attempt, ending in endings:
        counts[ending.klass] += 1
        if tries.exhausted(counts, ending.klass):
            return counts, Final(rollout, attempt, ending, counts.total())
    return counts, None
