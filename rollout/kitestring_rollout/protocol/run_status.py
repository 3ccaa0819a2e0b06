"""GET /run/v1/status of the trainer process: what a live view, the operator and CI read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kitestring_rollout.protocol.gateway_admin import Message

Phase = Literal["Starting", "Validating", "RollingOut", "Updating", "PushingWeights", "Finished", "Failed"]


class RolloutCounts(Message):
    """Rollouts of the current plan, and totals of the run by final class."""

    planned: int = 0
    waiting: int = 0
    running: int = 0
    finished: int = 0
    retried: int = 0
    classes: dict[str, int] = Field(default_factory=dict, description="whole run, committed rollouts by class")
    excluded: int = 0
    superseded: int = 0


class ValidationResult(Message):
    step: int
    mode: Literal["validation-greedy", "validation-sampled"]
    reward: float | None = Field(description="mean over all tasks; None when none could be scored")
    rollouts: int
    scored: int
    tool_use: float | None = Field(default=None, description="share of proven rollouts with a tool call")


class RunStatus(Message):
    run: str
    phase: Phase
    reason: str | None = None
    message: str | None = None
    step: int = Field(description="the step being made, from 1; 0 before the first")
    made_step: int = Field(default=0, description="the last step whose updates are made and served")
    last_step_unix: float | None = Field(default=None, description="seconds; when this process last made a step")
    steps: int = Field(description="the last step to be made, as wanted now")
    incarnation: int
    policy_version: str | None = None
    reward: float | None = Field(default=None, description="mean reward of the last committed step")
    kl: float | None = None
    correlation: float | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    skipped_steps: int = 0
    skipped_in_row: int = Field(default=0, description="the latest steps, if there was nothing to learn from in them")
    degraded: bool = False
    rollouts: RolloutCounts = Field(default_factory=RolloutCounts)
    validation: tuple[ValidationResult, ...] = ()
    checkpoint: str | None = None
    unix_time: float
