"""Configuration of the trainer process: `kitestring trainer --config trainer.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from kitestring_api.v1alpha1 import RolloutPoolSpec, TrainingRunSpec
from kitestring_api.v1alpha1.policies import Policy
from kitestring_rollout.protocol.gateway_admin import AttemptLimits, RewardRule
from kitestring_rollout.scoring import ScorerService
from kitestring_rollout.storage import StoreConfig
from kitestring_trainer.errors import UserMistakeError
from kitestring_trainer.live import Url
from kitestring_trainer.queue.executors import PerTask
from kitestring_trainer.queue.rollouts import QueueRules
from kitestring_trainer.queue.state import Tries
from kitestring_trainer.tasks import TaskFields

RayAddress = Annotated[str, StringConstraints(pattern=r"^[^\s/:]+:[0-9]{1,5}$")]


class Part(BaseModel):
    """A part of the configuration: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Listener(Part):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = any free port")


class Timing(Part):
    """Seconds; the defaults suit a cluster."""

    lease: float = Field(default=30.0, gt=0, description="a lease expires so long after its last heartbeat")
    proof: float = Field(default=30.0, gt=0, description="an ended attempt not proven complete by then is lost")
    retry: float = Field(default=2.0, gt=0, description="before the second try where the infrastructure failed")
    poll: float = Field(default=0.05, gt=0, description="between two looks into the trace store")
    first_answer: float = Field(
        default=60.0, gt=0, description="storage that has not answered once for so long ends the process"
    )
    gateway_gone: float = Field(default=60.0, gt=0, description="a gateway unreachable for so long is taken for gone")
    stop: float = Field(
        default=25.0, gt=0, description="from SIGTERM to the end of the process; a longer update is given up"
    )


class TrainerConfig(Part):
    """What the trainer process of one run needs. References are resolved: models and task files are paths here."""

    run: str = Field(min_length=1)
    spec: TrainingRunSpec
    pool: RolloutPoolSpec
    store: StoreConfig
    folder: Path = Field(description="weights/, checkpoints/, tensorboard/, metrics.jsonl, result.json lie in it")
    model: Path | None = Field(default=None, description="Hugging Face folder of the trained policy; backend verl")
    train_tasks: Path | None = Field(default=None, description="absent: spec.tasks.train.inline")
    validation_tasks: Path | None = Field(default=None, description="absent: spec.tasks.validation.inline, or none")
    working_folder: Path | None = Field(default=None, description="where a scoring command of the user's runs")
    scorer: Url | None = Field(default=None, description="where the pool's scorer listens; reward.source: scorer")
    queue: Listener = Listener()
    queue_credential_file: Path
    gateways: tuple[Url, ...] = Field(min_length=1, description="admin URL of each gateway process")
    gateway_credential_file: Path
    policy_servers: tuple[Url, ...] = Field(default=(), description="base URLs without /v1; backend verl")
    timing: Timing = Timing()
    artifacts: bool = Field(
        default=False,
        description="checkpoints, resumable state and metrics go to the store as well, and come from there on resume",
    )
    ray_head: RayAddress | None = Field(
        default=None,
        description="host:port of Ray on the first of spec.trainer.nodes machines; on each of them this process runs "
        "with the same config, and with its number, from 0, in JOB_COMPLETION_INDEX",
    )
    termination_log: Path | None = Field(
        default=None, description="gets how the process ended, as one JSON object of at most 4,000 bytes"
    )
    resume: bool = Field(default=False, description="go on where an earlier process of this run ended; also --resume")

    @model_validator(mode="after")
    def _parts_have_what_they_need(self) -> TrainerConfig:
        if self.spec.trainer.backend == "verl" and not (self.model and self.policy_servers):
            raise ValueError("model and policy_servers are required with spec.trainer.backend: verl")
        if (self.scorer is not None) != (self.pool.reward.source == "scorer"):
            raise ValueError("scorer is required with pool.reward.source: scorer and has no meaning otherwise")
        return self

    @property
    def storage_place(self) -> str:
        """Where a user says which object storage this run has."""
        if self.store.kind == "directory":
            return "the run's folder"
        return "spec.storage" if self.spec.storage is not None else "defaultStorage of the installation"

    @property
    def policy(self) -> Policy:
        """The policy that agents get as their model: the trained one, or the first where nothing is trained."""
        return (self.spec.trained_policies or tuple(self.spec.policies))[0]

    @property
    def rules(self) -> QueueRules:
        limits, attempts, reward = self.pool.limits, self.pool.attempts, self.pool.reward
        return QueueRules(
            run=self.run,
            model=self.policy.name,
            limits=AttemptLimits(
                calls=limits.calls,
                concurrent_calls=limits.concurrent_calls,
                tokens=limits.tokens,
                frozen_tokens=dict(limits.frozen_tokens),
                rewards=limits.rewards,
            ),
            reward=RewardRule(
                accepted=reward.source == "agent",
                duplicates=reward.duplicates,
                booleans=reward.booleans,
                minimum=reward.min,
                maximum=reward.max,
            ),
            deadline_seconds=limits.seconds,
            tries=Tries(total=attempts.max, agent_failed=attempts.agent_failed, timed_out=attempts.timed_out),
            lease_seconds=self.timing.lease,
            proof_seconds=self.timing.proof,
            retry_seconds=self.timing.retry,
            per_task=PerTask(
                image_field=self.pool.per_task.image_field,
                resources_field=self.pool.per_task.resources_field,
                allowed_images=tuple(self.pool.allowed_images),
            ),
        )

    @property
    def scorer_service(self) -> ScorerService | None:
        """A client of the pool's scorer, where it has one."""
        scorer = self.pool.reward.scorer
        return ScorerService(self.scorer, scorer) if self.scorer is not None and scorer is not None else None

    @property
    def task_fields(self) -> TaskFields:
        """Raises UserMistakeError when the field that the agent gets is hidden from it."""
        tasks, delivery = self.spec.tasks, self.pool.agent_protocol.task
        required = [(name, "spec.tasks.hiddenFields") for name in tasks.hidden_fields]
        required += [(name, "spec.tasks.visibleFields") for name in tasks.visible_fields or ()]
        if delivery.field is not None:
            if delivery.field in tasks.hidden_fields:
                raise UserMistakeError(
                    f"spec.agentProtocol.task.field is {delivery.field!r}, which spec.tasks.hiddenFields keeps from "
                    "the agent; name a visible field, or remove it from hiddenFields"
                )
            required.append((delivery.field, "spec.agentProtocol.task.field"))
        scorer = self.pool.reward.builtin
        if scorer is not None:
            named = {"expectedField": scorer.expected_field, "patternField": scorer.pattern_field}
            required += [(name, f"spec.reward.builtin.{where}") for where, name in named.items() if name is not None]
        visible = None if tasks.visible_fields is None else tuple(tasks.visible_fields)
        return TaskFields(frozenset(tasks.hidden_fields), visible, tuple(required), delivery)


def read_config(path: Path) -> TrainerConfig:
    """Raises UserMistakeError naming the field."""
    try:
        return TrainerConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserMistakeError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserMistakeError(f"{path}: {where or 'file'}: {first['msg']}") from error


def read_credential(path: Path) -> str:
    """The secret in a file, without blanks at its ends. Raises UserMistakeError when there is none."""
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise UserMistakeError(f"credential file {path}: {error.strerror}") from error
    if not secret:
        raise UserMistakeError(f"credential file {path} is empty; write a secret of 32 random characters into it")
    return secret
