"""The queue's protocol under any order of messages, expiries, lost gateways and proofs."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kitestring_api.names import (
    CLASS_AGENT_FAILED,
    CLASS_INFRASTRUCTURE,
    CLASS_SUCCEEDED,
    CLASS_TIMED_OUT,
)
from kitestring_trainer.queue.state import (
    AttemptClosedError,
    Ending,
    Entry,
    LeaseGoneError,
    Phase,
    Place,
    QueueState,
    Tries,
)

TTL = 10.0
LONGEST = 100.0
TRIES = Tries(total=3, agent_failed=2, timed_out=1)
CLASSES = (CLASS_SUCCEEDED, CLASS_AGENT_FAILED, CLASS_TIMED_OUT, CLASS_INFRASTRUCTURE)


class QueueMachine(RuleBasedStateMachine):
    """Plays executors, gateways and time against a QueueState, and keeps its own books of what it saw."""

    attempts = Bundle("attempts")
    leases = Bundle("leases")

    @initialize(n=st.integers(1, 4))
    def plan(self, n: int) -> None:
        ids = count()
        self.now = 0.0
        self.state = QueueState(
            tries=TRIES,
            ttl_seconds=TTL,
            new_attempt=lambda: f"attempt-{next(ids):04d}",
            new_lease=lambda: f"lease-{next(ids):04d}",
        )
        self.rollouts = [f"r{i}" for i in range(n)]
        self.state.add(Entry(rollout=r, group="g", step=1, mode="train", task=0) for r in self.rollouts)
        self.owner: dict[str, str] = {}
        """rollout → its attempt that is not over."""
        self.rollout_of: dict[str, str] = {}
        self.lease_of: dict[str, str] = {}
        self.ended: dict[str, Counter[str]] = {r: Counter() for r in self.rollouts}
        self.finals: dict[str, str] = {}

    def over(self, attempt: str) -> None:
        self.owner.pop(self.rollout_of[attempt], None)

    @rule(target=attempts, limit=st.integers(1, 4))
    def take(self, limit: int) -> object:
        taken = self.state.take(limit, self.now)
        assert len(taken) <= limit
        for entry in taken:
            assert entry.attempt is not None
            assert entry.attempt not in self.rollout_of, "an attempt id is used once"
            assert entry.rollout not in self.owner, "the attempt before must be over"
            assert entry.rollout not in self.finals
            self.owner[entry.rollout] = entry.attempt
            self.rollout_of[entry.attempt] = entry.rollout
        return multiple(*(entry.attempt for entry in taken))

    @rule(target=leases, attempt=attempts)
    def opened(self, attempt: str) -> object:
        entry = self.state.opened(attempt, Place("gateway", "epoch"), "worker", self.now)
        if entry is None:
            return multiple()
        assert self.owner[self.rollout_of[attempt]] == attempt
        assert attempt not in self.lease_of, "an attempt has one owner"
        assert entry.lease is not None
        self.lease_of[attempt] = entry.lease
        return (entry.lease, attempt)

    @rule(target=attempts, index=st.integers(0, 4))
    def take_one(self, index: int) -> object:
        """An executor of its own asks for its rollout."""
        rollout = f"r{index}"
        if rollout not in self.rollouts or rollout in self.finals:
            with pytest.raises(LookupError):
                self.state.take_one(rollout, self.now)
            return multiple()
        wanted = [entry.rollout for entry in self.state.wanted(self.now)]
        entry = self.state.take_one(rollout, self.now)
        assert (entry is not None) == (rollout in wanted)
        if entry is None:
            return multiple()
        attempt = entry.attempt or ""
        assert attempt not in self.rollout_of and rollout not in self.owner
        self.owner[rollout], self.rollout_of[attempt] = attempt, rollout
        return attempt

    @rule(index=st.integers(0, 3), number=st.integers(1, 3))
    def lost(self, index: int, number: int) -> None:
        entry = next((e for e in self.state.entries() if e.rollout == f"r{index}"), None)
        due = entry is not None and entry.phase is Phase.LEASED and number == self.ended[entry.rollout].total() + 1
        assert (self.state.lost(f"r{index}", number) is not None) == due
        assert not due or (entry is not None and entry.phase is Phase.CLOSING)

    @rule(index=st.integers(0, 3), number=st.integers(1, 3), klass=st.sampled_from(CLASSES[1:]), wait=st.floats(0, 9))
    def not_begun(self, index: int, number: int, klass: str, wait: float) -> None:
        rollout = f"r{index}"
        entry = next((e for e in self.state.entries() if e.rollout == rollout), None)
        due = entry is not None and entry.phase is Phase.WAITING and number == self.ended[rollout].total() + 1
        changed = self.state.not_begun(rollout, number, Ending(klass), self.now + wait)
        assert (changed is not None) == due
        if changed is None:
            return
        self.ended[rollout][klass] += 1
        assert self.now + wait == self.now or rollout not in [e.rollout for e in self.state.wanted(self.now)]
        if changed.final is not None:
            assert (changed.final.attempt, changed.final.tries) == (None, self.ended[rollout].total())
            self.finals[rollout] = klass

    @rule(attempt=attempts, wait=st.floats(0, 20))
    def not_opened(self, attempt: str, wait: float) -> None:
        before = self.state.of_attempt(attempt)
        opening = before is not None and before.phase is Phase.OPENING
        self.state.not_opened(attempt, self.now + wait)
        if opening:
            self.over(attempt)

    @rule(lease=leases)
    def undelivered(self, lease: tuple[str, str]) -> None:
        secret, attempt = lease
        entry = self.state.of_attempt(attempt)
        leased = entry is not None and entry.phase is Phase.LEASED
        self.state.undelivered(secret)
        if leased:
            self.over(attempt)

    @rule(target=leases)
    def take_and_open(self) -> object:
        """What an executor sees of a lease that goes well."""
        taken = self.state.take(1, self.now)
        for entry in taken:
            attempt = entry.attempt or ""
            assert attempt not in self.rollout_of and entry.rollout not in self.owner
            self.owner[entry.rollout], self.rollout_of[attempt] = attempt, entry.rollout
            return self.opened(attempt)
        return multiple()

    @rule(lease=leases)
    def heartbeat(self, lease: tuple[str, str]) -> None:
        secret, attempt = lease
        entry = self.state.of_attempt(attempt)
        try:
            cancel = self.state.heartbeat(secret, self.now, LONGEST)
        except LeaseGoneError:
            assert entry is None or entry.phase is not Phase.LEASED
            return
        assert entry is not None and entry.phase is Phase.LEASED
        assert cancel == (self.now - entry.leased_at > LONGEST)
        assert cancel or entry.expires == self.now + TTL

    @rule(lease=leases, other=leases)
    def finish(self, lease: tuple[str, str], other: tuple[str, str]) -> None:
        secret, attempt = lease
        if other[1] != attempt:
            with pytest.raises(AttemptClosedError):
                self.state.finish(secret, other[1])
        entry = self.state.of_attempt(attempt)
        leased = entry is not None and entry.phase is Phase.LEASED
        if not leased:
            with pytest.raises(AttemptClosedError):
                self.state.finish(secret, attempt)
            return
        assert self.state.finish(secret, attempt).phase is Phase.CLOSING
        with pytest.raises(AttemptClosedError):
            self.state.finish(secret, attempt)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for entry in self.state.expire(self.now):
            assert entry.phase is Phase.CLOSING
            assert entry.expires <= self.now
        assert all(e.phase is not Phase.LEASED or e.expires > self.now for e in self.state.entries())

    @rule(attempt=attempts)
    def closed(self, attempt: str) -> None:
        entry = self.state.of_attempt(attempt)
        closing = entry is not None and entry.phase is Phase.CLOSING
        assert self.state.closed(attempt) == closing

    @rule(attempt=attempts, klass=st.sampled_from(CLASSES), wait=st.none() | st.floats(0, 5))
    def settled(self, attempt: str, klass: str, wait: float | None) -> None:
        before = self.state.of_attempt(attempt)
        due = before is not None and before.phase in (Phase.CLOSING, Phase.PROVING)
        entry = self.state.settle(attempt, Ending(klass), None if wait is None else self.now + wait)
        assert (entry is not None) == due
        if entry is None:
            return
        rollout = self.rollout_of[attempt]
        assert entry.rollout == rollout
        assert rollout not in self.finals, "a rollout ends once"
        self.over(attempt)
        self.ended[rollout][klass] += 1
        if entry.final is not None:
            assert entry.final.attempt == attempt
            assert entry.final.ending.klass == klass
            assert entry.final.tries == self.ended[rollout].total()
            self.finals[rollout] = klass

    @rule(target=attempts, klass=st.sampled_from([CLASS_INFRASTRUCTURE, CLASS_INFRASTRUCTURE, CLASS_AGENT_FAILED]))
    def whole_attempt(self, klass: str) -> object:
        """One from beginning to end, which fails."""
        taken = self.state.take(1, self.now)
        if not taken:
            return multiple()
        (entry,) = taken
        attempt, rollout = entry.attempt or "", entry.rollout
        assert rollout not in self.owner
        self.owner[rollout], self.rollout_of[attempt] = attempt, rollout
        leased = self.state.opened(attempt, Place("gateway", "epoch"), "worker", self.now)
        assert leased is not None
        self.lease_of[attempt] = leased.lease or ""
        self.state.finish(leased.lease or "", attempt)
        self.closed(attempt)
        self.settled(attempt, klass, None)
        return attempt

    @rule(lease=consumes(leases))
    def forget_lease(self, lease: tuple[str, str]) -> None:
        """The executor dies: nothing more is said under this lease."""

    @invariant()
    def tries_are_bounded(self) -> None:
        if not hasattr(self, "state"):
            return
        for rollout, counts in self.ended.items():
            assert counts[CLASS_SUCCEEDED] <= 1
            assert counts[CLASS_AGENT_FAILED] <= TRIES.agent_failed
            assert counts[CLASS_TIMED_OUT] <= TRIES.timed_out
            assert counts.total() <= TRIES.total
            entry = self.state.entry(rollout)
            assert (entry.phase is Phase.FINAL) == (rollout in self.finals)
            assert (entry.attempt is None) == (rollout not in self.owner)

    def teardown(self) -> None:
        """Whatever happened, executors that do their duty bring every rollout to its one end."""
        if not hasattr(self, "state"):
            return
        for _ in range(10 * len(self.rollouts)):
            self.now += 2 * TTL + LONGEST
            self.state.expire(self.now)
            for entry in list(self.state.entries()):
                if entry.phase is Phase.OPENING:
                    self.state.not_opened(entry.attempt or "", self.now)
                elif entry.phase in (Phase.CLOSING, Phase.PROVING):
                    self.state.settle(entry.attempt or "", Ending(CLASS_INFRASTRUCTURE))
            for entry in self.state.take(10, self.now):
                attempt = entry.attempt or ""
                leased = self.state.opened(attempt, Place("gateway", "epoch"), "worker", self.now)
                assert leased is not None and leased.lease is not None
                self.state.finish(leased.lease, attempt)
                assert self.state.closed(attempt)
                self.state.settle(attempt, Ending(CLASS_SUCCEEDED))
        assert all(entry.phase is Phase.FINAL and entry.final is not None for entry in self.state.entries())


QueueMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQueueMachine = QueueMachine.TestCase


def make_state() -> QueueState:
    ids = count()
    return QueueState(
        tries=TRIES, ttl_seconds=TTL, new_attempt=lambda: f"a{next(ids)}", new_lease=lambda: f"l{next(ids)}"
    )


def entry(rollout: str) -> Entry:
    return Entry(rollout=rollout, group="g", step=1, mode="train", task=0)


def leased(state: QueueState, now: float = 0.0) -> Entry:
    (taken,) = state.take(1, now)
    found = state.opened(taken.attempt or "", Place("gateway", "epoch"), "worker", now)
    assert found is not None
    return found


def test_a_rollout_whose_executor_was_lost_is_next_in_line() -> None:
    state = make_state()
    state.add([entry("r0"), entry("r1"), entry("r2")])
    first = leased(state)
    attempt = first.attempt or ""
    (expired,) = state.expire(TTL)
    assert expired is first
    assert [e.rollout for e in state.take(1, TTL)] == ["r1"], "not before its close is confirmed"
    assert state.closed(attempt)
    state.settle(attempt, Ending(CLASS_INFRASTRUCTURE))
    assert [e.rollout for e in state.take(2, TTL)] == ["r0", "r2"]


def test_a_rollout_that_no_gateway_opened_waits_and_loses_no_try() -> None:
    state = make_state()
    state.add([entry("r0")])
    (taken,) = state.take(1, 0.0)
    state.not_opened(taken.attempt or "", 5.0)
    assert not state.waiting(4.9)
    assert state.take(1, 4.9) == []
    assert state.waiting(5.0)
    (again,) = state.take(1, 5.0)
    assert again.counts.total() == 0


def test_removed_rollouts_take_no_more_messages() -> None:
    state = make_state()
    state.add([entry("r0"), entry("r1")])
    open_one = leased(state)
    attempt, lease = open_one.attempt or "", open_one.lease or ""
    (opening,) = state.take(1, 0.0)
    opening_attempt = opening.attempt or ""
    state.remove(["r0", "r1"])
    assert state.opened(opening_attempt, Place("gateway", "epoch"), "worker", 0.0) is None
    with pytest.raises(LeaseGoneError):
        state.heartbeat(lease, 0.0, LONGEST)
    with pytest.raises(AttemptClosedError):
        state.finish(lease, attempt)
    assert state.settle(attempt, Ending(CLASS_SUCCEEDED)) is None
    assert list(state.entries()) == []


def test_the_same_rollout_is_queued_once() -> None:
    state = make_state()
    state.add([entry("r0")])
    with pytest.raises(ValueError, match="r0"):
        state.add([entry("r0")])
