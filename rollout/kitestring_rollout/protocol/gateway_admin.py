"""What the rollout queue and the trainer say to a gateway process (admin port, bearer credential)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Message(BaseModel):
    """A message of the wire protocol: unknown fields are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Mode = Literal["train", "validation-greedy", "validation-sampled", "try"]


class AttemptLimits(Message):
    """Limits that the gateway holds for one attempt; counted over all its calls."""

    calls: int = Field(gt=0)
    concurrent_calls: int = Field(gt=0)
    tokens: int = Field(gt=0, description="prompt and completion tokens of trained and frozen models together")
    frozen_tokens: dict[str, int] = Field(default_factory=dict, description="per frozen model, by its name in the run")
    rewards: int = Field(default=1, gt=0, description="rewards that the agent may post")
    agent_span_bytes: int = Field(default=4 * 1024 * 1024, gt=0)


class RewardRule(Message):
    """How rewards posted by the agent are taken (RolloutPool `spec.reward`)."""

    accepted: bool = Field(description="the pool's reward source is `agent`")
    duplicates: Literal["refuse", "first", "last", "max"] = "refuse"
    booleans: Literal["refuse", "asNumber"] = "refuse"
    minimum: float | None = None
    maximum: float | None = None


class OpenAttempt(Message):
    """POST /admin/v1/attempts. The same attempt again while it is open answers the same; a closed one 409."""

    run: str
    rollout: str
    attempt: str = Field(description="UUIDv7; its 16 bytes are the OpenTelemetry trace id")
    group: str
    task: int = Field(ge=0, description="row of the task file, from 0")
    step: int = Field(ge=0)
    mode: Mode
    limits: AttemptLimits
    reward: RewardRule
    lifetime_seconds: float = Field(gt=0, description="from now until the token expires")


class HeldAttempt(Message):
    """An attempt that a gateway process holds: open, or fenced and not yet ended."""

    run: str
    rollout: str
    attempt: str
    group: str
    step: int
    mode: Mode
    state: Literal["open", "fencing", "fenced", "ended"]
    opened_unix_nano: int
    expires_unix: float = Field(description="seconds; when its token expires")


class HeldAttempts(Message):
    """GET /admin/v1/attempts: what a trainer that was started anew has to fence and end, or fence and leave."""

    epoch: str
    attempts: tuple[HeldAttempt, ...]


class OpenedAttempt(Message):
    attempt: str
    epoch: str = Field(description="of the gateway process: random, made at its start")
    base_url: str = Field(description="without version: `{base_url}/v1` is an OpenAI base URL")
    token: str
    traceparent: str


class PostedReward(Message):
    value: float
    name: str = "reward"
    received_unix_nano: int


class CallCounts(Message):
    """Calls of an attempt by outcome; `admitted` is the sum of the others."""

    admitted: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    undelivered: int = 0
    rejected: int = Field(default=0, description="refused before admission (limits, bad token scope): not numbered")
    nonconforming: int = Field(default=0, description="admitted calls whose sampling was replaced")


class FencedAttempt(Message):
    """POST /admin/v1/attempts/{attempt}/fence: no further call is admitted, calls in flight were aborted and recorded
    as cancelled, every span was acknowledged (or the attempt is lost). Idempotent."""

    attempt: str
    epoch: str
    n_calls: int
    digest: str = Field(description="hex sha256 over the payload hashes of calls 1..N in order")
    lost: str | None = Field(default=None, description="why a span could not be made durable; None = all are")
    calls: CallCounts
    prompt_tokens: int
    completion_tokens: int
    rewards: tuple[PostedReward, ...] = ()
    last_message: str | None = Field(default=None, description="text of the last reply delivered to the agent")


class EndAttempt(Message):
    """POST /admin/v1/attempts/{attempt}/end, after fence and scoring: writes `rollout.end`. Equal bodies may repeat."""

    outcome: str = Field(description="a failure class of kitestring_api.names.CLASSES")
    reason: str | None = Field(default=None, description="one line a user can read, for classes but Succeeded")
    reward: float | None = None
    reward_source: str | None = None
    exit_code: int | None = None
    seconds: float | None = Field(default=None, description="wall time of the agent process")
    output: str | None = Field(default=None, description="what the agent gave back, bounded by the pool")


class EndedAttempt(Message):
    attempt: str
    epoch: str
    n_calls: int
    digest: str


class HoldPolicy(Message):
    """POST /admin/v1/policies/{policy}/hold: requests for the policy wait at the gateway until release."""

    drain_seconds: float = Field(ge=0, description="wait this long for calls in flight to end before answering")


class HeldPolicy(Message):
    in_flight: int = Field(description="calls still generating when the wait ended")


class ReleasePolicy(Message):
    version: str = Field(description="the policy version now served: `{incarnation}.{push}`")


class PolicyServerList(Message):
    """PUT /admin/v1/policies/{policy}/servers: from now on calls go to these; answered with the same. Calls in flight
    at another one end there."""

    servers: tuple[str, ...] = Field(min_length=1, description="base URLs without /v1")


class GatewayStatus(Message):
    epoch: str
    draining: bool
    attempts_open: int
    calls_in_flight: int
    calls_held: int
    calls_total: int
    rejected_total: int
    completion_tokens_total: int
    spans_pending: int


class ProtocolError(Message):
    """Body of every 4xx/5xx answer of the admin and queue routes."""

    error: str
    reason: str = Field(
        description="stable, CamelCase: UnknownAttempt, EpochGone, Draining, AttemptClosed, Unauthorized, …"
    )
