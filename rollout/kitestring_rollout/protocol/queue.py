"""What executors (worker, Kubernetes Job, local process) say to the rollout queue (bearer credential)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kitestring_rollout.protocol.gateway_admin import Message, Mode


class LeaseRequest(Message):
    """POST /queue/v1/lease, long poll. 200 Leases (possibly empty after `wait_seconds`), 410 when the run has ended."""

    executor: str = Field(description="name of the executor, for logs and status only", max_length=253)
    capacity: int = Field(gt=0, le=256, description="leases wanted at most")
    wait_seconds: float = Field(ge=0, le=60)
    rollout: str | None = Field(
        default=None, description="only this rollout (isolation: Job): waits until it can be had, 404 when it never can"
    )


class Lease(Message):
    """One attempt at one rollout; already opened at a gateway."""

    lease: str = Field(description="secret of this lease: whoever knows it may heartbeat and finish it")
    rollout: str
    attempt: str
    group: str
    step: int
    mode: Mode
    task_index: int
    task: dict[str, Any] = Field(description="the visible part of the task")
    base_url: str
    token: str
    traceparent: str
    model: str = Field(description="name of the trained policy")
    ttl_seconds: float = Field(gt=0, description="the lease expires this long after the last heartbeat")
    deadline_seconds: float = Field(gt=0, description="wall time the agent may take (pool limits.seconds)")


class Leases(Message):
    leases: tuple[Lease, ...] = ()


class Heartbeat(Message):
    """POST /queue/v1/leases/{lease}/heartbeat. 410 when the lease is gone: end the agent, report nothing."""

    running_seconds: float = Field(ge=0)


class HeartbeatReply(Message):
    cancel: bool = Field(description="end the agent now; a finish is still wanted")
    ttl_seconds: float


EndKind = Literal["exited", "signalled", "deadline", "cutOff", "startFailed", "cancelled", "executorLost"]
"""cutOff: it failed, or was not started, and its gateway could not be reached from where it ran."""


class Finish(Message):
    """POST /queue/v1/leases/{lease}/finish: the agent has ended, no process is left. 409 for a closed attempt."""

    attempt: str
    ended: EndKind
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = Field(
        default=None, max_length=4096, description="for startFailed and the like: cause and remedy"
    )
    output: str = Field(default="", description="what the pool reads back, cut at its maxBytes")
    output_truncated: bool = False
    log_tail: str = Field(default="", max_length=65536)
    log_bytes: int = 0
    seconds: float = Field(ge=0)
    start_seconds: float = Field(default=0.0, ge=0, description="from lease to the agent's first line, as far as known")


class FinishReply(Message):
    outcome: str = Field(description="the failure class given to the attempt")
    reward: float | None
    retry: bool = Field(description="the rollout will be leased again")


class WantedRollout(Message):
    """A rollout that waits for an executor of its own."""

    rollout: str
    number: int = Field(ge=1, description="which attempt of the rollout this will be, from 1")
    image: str | None = Field(default=None, description="what the task asks for; None: the pool's")
    resources: dict[str, Any] | None = Field(default=None, description="requests and limits that the task asks for")
    credential: str = Field(description="leases, keeps and finishes this rollout and no other")


class WantedRollouts(Message):
    """GET /queue/v1/wanted?limit=: the first so many, in the order in which they are to start."""

    rollouts: tuple[WantedRollout, ...] = ()


class LostRollout(Message):
    """POST /queue/v1/rollouts/{rollout}/lost: what the cluster knows of an executor that ended without a finish.

    Said twice, or of an attempt that is over, it changes nothing.
    """

    number: int = Field(ge=1, description="the `number` under which the rollout was wanted")
    outcome: str = Field(description="failure class by the state of the pod")
    message: str = Field(max_length=4096)


class LostReply(Message):
    changed: bool = Field(description="false: the attempt had ended already")
