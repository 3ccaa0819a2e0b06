"""What a trainer says of its run (GET /run/v1/status), as far as the operator reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kitestring_api import names

Count = Annotated[int, Field(ge=0)]


class _Message(BaseModel):
    """Fields that the operator does not know are passed over: a trainer may be newer."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class RolloutCounts(_Message):
    """Rollouts of the current plan, and totals of the run."""

    running: Count = 0
    retried: Count = 0
    classes: dict[str, Count] = Field(default_factory=dict, max_length=16)
    excluded: Count = 0

    @property
    def failed(self) -> int:
        """Rollouts whose agent failed or ran out of time."""
        return self.classes.get(names.CLASS_AGENT_FAILED, 0) + self.classes.get(names.CLASS_TIMED_OUT, 0)


class ValidationResult(_Message):
    """Mean reward over the validation tasks at one step."""

    step: Count
    mode: str
    reward: float | None


class RunReport(_Message):
    """The state of a run as its trainer knows it."""

    phase: Literal["Starting", "Validating", "RollingOut", "Updating", "PushingWeights", "Finished", "Failed"]
    reason: str | None = None
    message: str | None = Field(default=None, max_length=65536)
    step: Count
    """The step being made, from 1; 0 before the first."""
    made_step: Count | None = None
    """The last step that was made."""
    steps: Count
    reward: float | None = None
    tokens: Count = 0
    eta_seconds: Annotated[float, Field(ge=0)] | None = None
    skipped_steps: Count = 0
    skipped_in_row: Count = 0
    degraded: bool = False
    rollouts: RolloutCounts = RolloutCounts()
    validation: Annotated[tuple[ValidationResult, ...], Field(strict=False)] = ()
    checkpoint: Annotated[str, Field(max_length=2048)] | None = None
    since_step_seconds: float | None = None
    """Since the operator saw another step; set by the operator, not by the trainer."""
    step_seconds: float | None = None
    """Longest step that the operator saw; set by the operator."""

    @property
    def steps_done(self) -> int:
        """Steps that have ended."""
        if self.made_step is not None:
            return self.made_step
        return self.step if self.phase == "Finished" else max(self.step - 1, 0)

    @property
    def validated_before(self) -> float | None:
        """Mean sampled validation reward before the first step."""
        return next((found.reward for found in sampled(self.validation) if found.step == 0), None)

    @property
    def validated(self) -> float | None:
        """The latest mean sampled validation reward."""
        return latest(self.validation)


def sampled(results: Iterable[ValidationResult]) -> list[ValidationResult]:
    """Those that were sampled as in training."""
    return [found for found in results if found.mode == names.MODE_VALIDATION_SAMPLED]


def latest(results: Iterable[ValidationResult]) -> float | None:
    """Mean sampled reward of the latest step that was validated."""
    found = sampled(results)
    return max(found, key=lambda result: result.step).reward if found else None
