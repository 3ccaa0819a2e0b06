"""What is: phases, conditions and counters of a run and of a pool, written by the operator only."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel


class Phase(StrEnum):
    """Where a run is: exactly one of these, a closed set."""

    PENDING = "Pending"
    """Seen, nothing made of it yet; `reason` says what it waits for."""
    QUEUED = "Queued"
    """Waits for its queue to admit it."""
    STARTING = "Starting"
    """Its parts are being started; no rollout has run."""
    RUNNING = "Running"
    """Rollouts and updates go on."""
    SUSPENDING = "Suspending"
    """Writes a resumable checkpoint and ends its pods."""
    SUSPENDED = "Suspended"
    """Holds no pod; goes on where it was when `spec.suspend` is false."""
    RESTARTING = "Restarting"
    """A part was lost; it is started again from the last resumable checkpoint."""
    SUCCEEDED = "Succeeded"
    """Ended: all steps are done and the checkpoint is written."""
    FAILED = "Failed"
    """Ended: `reason`, `message` and `lastError` say why."""

    @property
    def is_final(self) -> bool:
        """Whether nothing follows this phase."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class ConditionType(StrEnum):
    """The conditions of a run and of a pool."""

    ACCEPTED = "Accepted"
    """The spec can be carried out by this version; false names the field and the remedy."""
    ADMITTED = "Admitted"
    """The queue has given the run its resources."""
    TRAINER_READY = "TrainerReady"
    """The trainer runs and answers."""
    INFERENCE_READY = "InferenceReady"
    """Every policy server serves the current version."""
    ROLLOUTS_READY = "RolloutsReady"
    """Gateway, collector and at least one worker are ready."""
    PROGRESSING = "Progressing"
    """A step has ended within the time that steps take."""
    DEGRADED = "Degraded"
    """The run goes on, but something is wrong with what it learns from; no best checkpoint is marked meanwhile."""
    SUSPENDED = "Suspended"
    """The run holds no pod because it was asked to or was preempted."""
    FINISHED = "Finished"
    """The run has ended, well or not: what `kubectl wait` waits for."""


class Condition(ApiModel):
    """One aspect of the state, as Kubernetes' own conditions."""

    model_config = ConfigDict(strict=False)

    type: ConditionType = Field(description="Which aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    observed_generation: int | None = Field(None, ge=0, description="Generation of the spec that it is about.")
    last_transition_time: datetime = Field(description="When `status` last changed.")
    reason: Annotated[
        str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ] = Field(description="Why, as one word of a documented set.")
    message: str = Field("", max_length=4096, description="Why, for a reader.")


class TrainingRunStatus(ApiModel):
    """What a run has done. Counters are flat; nothing here grows with the number of rollouts."""

    model_config = ConfigDict(strict=False)

    observed_generation: int | None = Field(None, ge=0, description="Generation of the spec that this is about.")
    phase: Phase | None = Field(None, description="Where the run is.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Aspects of the state.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    reason: str | None = Field(None, max_length=128, description="Why the run is in this phase, as one word.")
    message: str | None = Field(None, max_length=4096, description="Why the run is in this phase, for a reader.")
    step: int | None = Field(None, ge=0, description="Steps done.")
    steps: int | None = Field(None, ge=0, description="Steps wanted.")
    reward: float | None = Field(None, description="Mean reward of the rollouts of the last step.")
    validation_before: float | None = Field(None, description="Mean validation reward (sampled) before the first step.")
    validation: float | None = Field(None, description="Mean validation reward (sampled), latest.")
    rollouts_running: int | None = Field(None, ge=0, description="Rollouts that run now.")
    rollouts_succeeded: int | None = Field(None, ge=0, description="Rollouts that ended well.")
    rollouts_failed: int | None = Field(None, ge=0, description="Rollouts whose agent failed or ran out of time.")
    rollouts_retried: int | None = Field(None, ge=0, description="Attempts after the first.")
    rollouts_excluded: int | None = Field(None, ge=0, description="Rollouts left out of baseline and loss.")
    skipped_steps: int | None = Field(None, ge=0, description="Steps without a group to learn from.")
    restarts: int | None = Field(None, ge=0, description="Restarts of the trainer.")
    tokens: int | None = Field(None, ge=0, description="Tokens of all calls to trained policies: prompts and replies.")
    eta_seconds: int | None = Field(None, ge=0, description="Seconds until the end, by the pace so far.")
    start_time: datetime | None = Field(None, description="When the first trainer of the run was started.")
    completion_time: datetime | None = Field(None, description="When the run ended.")
    checkpoint: str | None = Field(None, max_length=2048, description="Where the latest exported checkpoint lies.")
    last_error: str | None = Field(None, max_length=8192, description="The last error: its pod and last lines.")


class RolloutPoolStatus(ApiModel):
    """What a pool runs, summed over the runs that use it."""

    model_config = ConfigDict(strict=False)

    observed_generation: int | None = Field(None, ge=0, description="Generation of the spec that this is about.")
    replicas: int | None = Field(None, ge=0, description="Workers or Jobs that exist, over all runs.")
    ready_replicas: int | None = Field(None, ge=0, description="Those of them that are ready.")
    runs: int | None = Field(None, ge=0, description="Runs that use the pool: those that have started and not ended.")
    users: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Names of these runs, the first 64.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    selector: str | None = Field(None, max_length=1024, description="Label selector of the workers, for `scale`.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Aspects of the state.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
