"""The state of one attempt at the gateway: numbering, limits, fence, digest's parts. Pure: no clock, no I/O.

    open ──begin_fence──► fencing ──(no call in flight)──► fenced ──end──► ended

A call is *admitted* (numbered 1, 2, …), *leaves* when it is no longer in flight, and is *settled* when its record is
final: exactly once each, whatever became of it. Numbers have no holes: at the fence every number from 1 to N has a
payload hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.rewards import Rewards
from kitestring_rollout.protocol.gateway_admin import AttemptLimits, CallCounts, OpenAttempt

OUTCOMES = ("ok", "failed", "cancelled", "undelivered")


class State(Enum):
    OPEN = "open"
    FENCING = "fencing"
    FENCED = "fenced"
    ENDED = "ended"


@dataclass(slots=True)
class Attempt:
    opened: OpenAttempt
    epoch: str
    expires: float
    """Unix seconds."""
    state: State = State.OPEN
    in_flight: int = 0
    hashes: list[bytes | None] = field(default_factory=list)
    """Payload hash of call i + 1; None while it has none."""
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    rejected: int = 0
    nonconforming: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    frozen_tokens: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    """Completion tokens that the calls in flight may still generate."""
    frozen_reserved: dict[str, int] = field(default_factory=dict)
    span_bytes: int = 0
    last_message: str | None = None
    _policy_spoke: bool = False
    lost: str | None = None
    rewards: Rewards = field(init=False)

    def __post_init__(self) -> None:
        self.rewards = Rewards(self.opened.reward, self.opened.limits.rewards)

    @property
    def limits(self) -> AttemptLimits:
        return self.opened.limits

    @property
    def n_calls(self) -> int:
        return len(self.hashes)

    def check_open(self) -> None:
        """Refusal 410 once the fence has begun."""
        if self.state is not State.OPEN:
            raise Refusal(410, "attempt_closed", "the attempt has been closed")

    def room(self, model: str, *, frozen: bool) -> int:
        """Tokens that a new call to `model` may use; not above 0 when there are none."""
        left = self.limits.tokens - self.prompt_tokens - self.completion_tokens - self.reserved
        bound = self.limits.frozen_tokens.get(model) if frozen else None
        if bound is None:
            return left
        return min(left, bound - self.frozen_tokens.get(model, 0) - self.frozen_reserved.get(model, 0))

    def admit(self, model: str, *, frozen: bool, reserve: int = 0) -> int:
        """The number of a new call to `model` that may generate `reserve` tokens; Refusal 410 when closed, 429 with
        the limit's code when over one. What calls in flight have reserved and do not use comes back: a client may ask
        again."""
        self.check_open()
        limits = self.limits
        if len(self.hashes) >= limits.calls:
            raise _over("calls_limit", f"the attempt's limit of {limits.calls} calls is used up")
        if self.in_flight >= limits.concurrent_calls:
            raise _over("concurrent_calls_limit", f"the attempt has {limits.concurrent_calls} calls in flight already")
        if self.prompt_tokens + self.completion_tokens >= limits.tokens:
            raise _over("tokens_limit", f"the attempt's limit of {limits.tokens} tokens is used up")
        if frozen:
            bound = limits.frozen_tokens.get(model)
            if bound is not None and self.frozen_tokens.get(model, 0) >= bound:
                raise _over("frozen_tokens_limit", f"the attempt's limit of {bound} tokens of {model!r} is used up")
        if self.room(model, frozen=frozen) <= 0:
            raise _over(
                "tokens_reserved", "the tokens left to the attempt are reserved by its calls in flight", again=True
            )
        self.reserved += reserve
        if frozen and reserve:
            self.frozen_reserved[model] = self.frozen_reserved.get(model, 0) + reserve
        self.hashes.append(None)
        self.in_flight += 1
        return len(self.hashes)

    def leave(self, model: str, *, frozen: bool, prompt_tokens: int, completion_tokens: int, reserved: int = 0) -> None:
        """A call is no longer in flight: its tokens count from now on, in place of what it had reserved."""
        self.in_flight -= 1
        self.reserved -= reserved
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if frozen:
            if reserved:
                self.frozen_reserved[model] -= reserved
            self.frozen_tokens[model] = self.frozen_tokens.get(model, 0) + prompt_tokens + completion_tokens

    def settle(self, seq: int, payload_hash: bytes, outcome: str, *, nonconforming: bool) -> None:
        """Closes call `seq`; exactly once per admitted call, at the latest at the fence."""
        if self.hashes[seq - 1] is not None:
            raise RuntimeError(f"call {seq} of attempt {self.opened.attempt} was settled twice")
        self.hashes[seq - 1] = payload_hash
        self.outcomes[outcome] += 1
        self.nonconforming += nonconforming

    def hear(self, text: str | None, *, trained: bool) -> None:
        """The agent got a reply. The last text counts: of the policy, where it has spoken at all, else of any model."""
        if text and (trained or not self._policy_spoke):
            self.last_message = text
            self._policy_spoke = trained

    def take_span_bytes(self, size: int) -> None:
        """Accounts for spans that the agent sent itself; Refusal 413 over the limit (OTLP clients retry a 429)."""
        self.check_open()
        if self.span_bytes + size > self.limits.agent_span_bytes:
            raise Refusal(
                413, "span_bytes_limit", f"the attempt may send {self.limits.agent_span_bytes} bytes of spans"
            )
        self.span_bytes += size

    def begin_fence(self) -> None:
        if self.state is State.OPEN:
            self.state = State.FENCING

    def finish_fence(self) -> None:
        if self.state is State.FENCING:
            if self.in_flight:
                raise RuntimeError(f"attempt {self.opened.attempt} has {self.in_flight} calls in flight at its fence")
            self.state = State.FENCED

    def end(self) -> None:
        if self.state is not State.FENCED:
            raise RuntimeError(f"attempt {self.opened.attempt} is {self.state.value}, not fenced")
        self.state = State.ENDED

    def lose(self, reason: str) -> None:
        """The first reason stays."""
        if self.lost is None:
            self.lost = reason

    def payload_hashes(self) -> tuple[bytes, ...]:
        """Of calls 1..N in order; only when none is in flight."""
        return tuple(_known(seq, value) for seq, value in enumerate(self.hashes, start=1))

    def counts(self) -> CallCounts:
        return CallCounts(
            admitted=self.n_calls, rejected=self.rejected, nonconforming=self.nonconforming, **self.outcomes
        )


def _known(seq: int, value: bytes | None) -> bytes:
    if value is None:
        raise RuntimeError(f"call {seq} has not been settled")
    return value


def _over(code: str, message: str, *, again: bool = False) -> Refusal:
    headers = {"Retry-After": "1"} if again else None
    return Refusal(429, code, message, kind="limit_exceeded", retry=again, headers=headers)
