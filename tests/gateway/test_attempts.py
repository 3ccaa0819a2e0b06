"""The state of an attempt: numbering without holes, limits, fence. A state machine is driven by random histories."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kitestring_rollout.gateway.attempts import OUTCOMES, Attempt, State
from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.protocol.gateway_admin import OpenAttempt
from tests.gateway.conftest import opening


def attempt(**limits: Any) -> Attempt:
    return Attempt(OpenAttempt.model_validate(opening(limits=limits)), "e" * 16, 1e12)


def code(state: Attempt, model: str = "policy", *, frozen: bool = False) -> str:
    with pytest.raises(Refusal) as caught:
        state.admit(model, frozen=frozen)
    return caught.value.code


def test_each_limit_has_its_code() -> None:
    state = attempt(calls=2, concurrent_calls=1)
    assert state.admit("policy", frozen=False) == 1
    assert code(state) == "concurrent_calls_limit"
    state.leave("policy", frozen=False, prompt_tokens=0, completion_tokens=0)
    assert state.admit("policy", frozen=False) == 2
    state.leave("policy", frozen=False, prompt_tokens=0, completion_tokens=0)
    assert code(state) == "calls_limit"


def test_tokens_are_counted_over_all_models_and_per_frozen_model() -> None:
    state = attempt(tokens=100, frozen_tokens={"judge": 10})
    state.admit("judge", frozen=True)
    state.leave("judge", frozen=True, prompt_tokens=8, completion_tokens=2)
    assert code(state, "judge", frozen=True) == "frozen_tokens_limit"
    assert state.admit("other", frozen=True) == 2
    state.leave("other", frozen=True, prompt_tokens=50, completion_tokens=40)
    assert code(state) == "tokens_limit"
    assert state.counts().admitted == 2


def test_settling_twice_and_ending_early_are_bugs() -> None:
    state = attempt()
    state.admit("policy", frozen=False)
    with pytest.raises(RuntimeError, match="has not been settled"):
        state.payload_hashes()
    state.begin_fence()
    with pytest.raises(RuntimeError, match="in flight"):
        state.finish_fence()
    state.settle(1, b"h", "ok", nonconforming=False)
    with pytest.raises(RuntimeError, match="settled twice"):
        state.settle(1, b"h", "ok", nonconforming=False)
    with pytest.raises(RuntimeError, match="not fenced"):
        state.end()


def test_the_last_words_are_the_policys_where_it_spoke() -> None:
    state = attempt()
    state.hear("judge first", trained=False)
    assert state.last_message == "judge first"
    state.hear("answer", trained=True)
    state.hear("good answer", trained=False)
    state.hear(None, trained=True)
    assert state.last_message == "answer"


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = attempt(calls=12, concurrent_calls=3, tokens=500)
        self.flying: dict[int, int] = {}
        """Calls in flight, with what they reserve."""
        self.landed: list[int] = []
        self.settled = 0

    @rule(asked=st.integers(0, 200))
    def admit(self, asked: int) -> None:
        before = self.state.n_calls
        room = self.state.room("policy", frozen=False)
        reserve = min(asked, max(room, 0))
        try:
            seq = self.state.admit("policy", frozen=False, reserve=reserve)
        except Refusal as refusal:
            assert self.state.n_calls == before
            full = before == 12 or len(self.flying) == 3 or room <= 0
            assert refusal.status == (410 if self.state.state is not State.OPEN else 429)
            assert self.state.state is not State.OPEN or full
        else:
            assert seq == before + 1 and self.state.state is State.OPEN
            self.flying[seq] = reserve

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def leave(self, data: st.DataObject, tokens: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.flying)))
        reserved = self.flying.pop(seq)
        self.landed.append(seq)
        self.state.leave("policy", frozen=False, prompt_tokens=tokens, completion_tokens=tokens, reserved=reserved)

    @precondition(lambda self: self.landed)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def settle(self, data: st.DataObject, outcome: str) -> None:
        seq = data.draw(st.sampled_from(self.landed))
        self.landed.remove(seq)
        self.state.settle(seq, hashlib.sha256(b"%d" % seq).digest(), outcome, nonconforming=False)
        self.settled += 1

    @rule()
    def begin_fence(self) -> None:
        self.state.begin_fence()
        assert self.state.state is not State.OPEN

    @precondition(lambda self: self.state.state is State.FENCING and not self.flying)
    @rule()
    def finish_fence(self) -> None:
        self.state.finish_fence()
        assert self.state.state is State.FENCED

    @invariant()
    def counts_add_up(self) -> None:
        counts = self.state.counts()
        assert counts.ok + counts.failed + counts.cancelled + counts.undelivered == self.settled
        assert counts.admitted == self.settled + len(self.flying) + len(self.landed)
        assert self.state.in_flight == len(self.flying) <= 3
        assert self.state.reserved == sum(self.flying.values()) <= 500
        if not self.flying and not self.landed:
            assert self.state.payload_hashes() == tuple(
                hashlib.sha256(b"%d" % seq).digest() for seq in range(1, counts.admitted + 1)
            )


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
