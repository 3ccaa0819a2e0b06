"""What a rollout leaves behind, as plain data: one `CallRecord` per numbered call, one `EndRecord` per attempt.

Token ids and logprobs are numpy arrays; everything else is JSON-able. Records compare by identity, not by value. Nobody
changes one once it is made; Python's own guard against it would cost a tenth of making it into a span.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kitestring_rollout.protocol.gateway_admin import CallCounts, Mode

TokenIds: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]
Json: TypeAlias = dict[str, Any]

Api = Literal["chat", "completions"]
Outcome = Literal["ok", "failed", "cancelled", "undelivered"]

NO_IDS: TokenIds = np.zeros(0, dtype=np.int32)
NO_LOGPROBS: Logprobs = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class AttemptIdentity:
    """What is the same in every record of an attempt. `epoch` names the gateway process that owns it."""

    run: str
    rollout: str
    attempt: str
    """UUID; its 16 bytes are the trace id."""
    group: str
    task: int
    step: int
    mode: Mode
    epoch: str
    """16 hex digits, random at the start of the gateway process."""


class OfAttempt:
    """What a record says of the attempt that it belongs to: the fields of its `identity`."""

    __slots__ = ()
    identity: AttemptIdentity

    @property
    def run(self) -> str:
        return self.identity.run

    @property
    def rollout(self) -> str:
        return self.identity.rollout

    @property
    def attempt(self) -> str:
        return self.identity.attempt

    @property
    def group(self) -> str:
        return self.identity.group

    @property
    def task(self) -> int:
        return self.identity.task

    @property
    def step(self) -> int:
        return self.identity.step

    @property
    def mode(self) -> Mode:
        return self.identity.mode

    @property
    def epoch(self) -> str:
        return self.identity.epoch


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `start:end` of a choice were sampled from policy `version` (`{incarnation}.{push}`)."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class ChoiceRecord:
    """One choice of a reply. T = response tokens; arrays are empty where the server did not report them."""

    index: int
    token_ids: TokenIds = field(default_factory=lambda: NO_IDS)
    """int32 [T]."""
    logprobs: Logprobs = field(default_factory=lambda: NO_LOGPROBS)
    """float32 [T], natural logarithm, of the distribution sampled from; or empty."""
    versions: tuple[VersionSpan, ...] = ()
    """In order, without gaps over 0..T; or empty when unknown."""
    finish_reason: str | None = None
    message: Json | None = None
    """The reply's message in OpenAI's shape (chat); None where contents are not recorded."""
    text: str | None = None
    """The reply's text (completions); None where contents are not recorded."""
    tool_calls: int = 0
    """Tool calls in the message: kept also where contents are not recorded."""


UNREACHABLE: Final = "upstream_unavailable"
"""Code of a refusal that the gateway gave because no server of the model answered."""


@dataclass(slots=True, eq=False)
class CallRecord(OfAttempt):
    """One numbered call of an attempt, whatever became of it. P = prompt tokens."""

    identity: AttemptIdentity
    seq: int
    """1..N in the order of admission."""
    api: Api
    model: str
    """Name of the model in the run (aliases resolved)."""
    requested_model: str
    trained: bool
    outcome: Outcome
    started_unix_nano: int
    ended_unix_nano: int
    streamed: bool = False
    status: int | None = None
    """HTTP status that the agent got; None when there was none."""
    error: str | None = None
    """Why it is not ok. Of a call that was refused: `code: message`; the code is the gateway's own word."""
    agent: str | None = None
    """Name of the sub-agent as claimed by the call: a label, never an identity."""
    first_chunk_unix_nano: int | None = None
    sampling: Json = field(default_factory=dict)
    """Parameters sent upstream: temperature, top_p, top_k, max_tokens, seed, …"""
    nonconforming: tuple[str, ...] = ()
    """Names of request fields that were replaced because training assumes other values."""
    prompt_token_ids: TokenIds = field(default_factory=lambda: NO_IDS)
    """int32 [P], or empty when the server did not report them."""
    choices: tuple[ChoiceRecord, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    response_id: str | None = None
    messages: tuple[Json, ...] = ()
    """The whole prompt in OpenAI's shape as the agent sent it (chat); a completions prompt is one `user` message.
    Only what is new since an earlier call of the attempt is written; a decoded record is whole again."""
    tools: tuple[Json, ...] | None = None
    """Tool definitions of the request in OpenAI's shape, or None when it had none."""
    memory_bytes: int = 0
    """What messages and tools take, roughly; 0 when it is little. Not written."""
    messages_shared: int = 0
    """Set by decoding: so many leading messages were written with an earlier call."""


@dataclass(frozen=True, slots=True)
class EndRecord(OfAttempt):
    """`rollout.end`: written once, after every call of the attempt was acknowledged and the attempt was scored."""

    identity: AttemptIdentity
    n_calls: int
    digest: str
    """Hex sha256 over the payload hashes of calls 1..N in order."""
    outcome: str
    """A failure class of `kitestring_api.names.CLASSES`."""
    started_unix_nano: int
    ended_unix_nano: int
    reason: str | None = None
    reward: float | None = None
    reward_source: str | None = None
    exit_code: int | None = None
    seconds: float | None = None
    output: str | None = None
    """What the agent gave back; None where contents are not recorded."""
    calls: CallCounts = field(default_factory=CallCounts)
