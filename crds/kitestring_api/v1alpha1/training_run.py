"""TrainingRun: what is trained, on which tasks, by which agent, with which algorithm and machines."""

from typing import ClassVar, Literal

from pydantic import Field

from kitestring_api.v1alpha1.algorithm import Algorithm
from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.metadata import ObjectMeta
from kitestring_api.v1alpha1.policies import Policy
from kitestring_api.v1alpha1.rollouts import Rollouts
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import Seconds, Token
from kitestring_api.v1alpha1.schedule import Checkpoints, FailurePolicy, Scheduling, Validation
from kitestring_api.v1alpha1.serving import Gateway, Inference, Traces
from kitestring_api.v1alpha1.status import TrainingRunStatus
from kitestring_api.v1alpha1.storage import Storage
from kitestring_api.v1alpha1.tasks import Tasks
from kitestring_api.v1alpha1.trainer import Trainer


class TrainingRunSpec(ApiModel):
    """What is trained, on which tasks, by which agent, with which algorithm and machines."""

    rules = (
        Rule(
            "self.trainer.backend == 'collect' || self.policies.exists(p, p.train)",
            "spec.policies needs one with train: true",
            "set train: true on the policy to be trained, or trainer.backend: collect to train none",
            field=".policies",
        ),
        Rule(
            "self.policies.all(p, p.aliases.all(alias, "
            "self.policies.exists_one(q, q.name == alias || alias in q.aliases)))",
            "spec.policies[].aliases must differ from all names and other aliases",
            "remove the alias that another policy has as name or alias",
            field=".policies",
        ),
        Rule(
            "self.algorithm.updatesPerStep <= self.rollouts.tasksPerStep * self.rollouts.groupSize",
            "spec.algorithm.updatesPerStep must not be greater than the rollouts of a step (tasksPerStep x groupSize)",
            "lower updatesPerStep, or raise rollouts.tasksPerStep",
            field=".algorithm.updatesPerStep",
        ),
        Rule(
            "self.trainer.backend == 'collect' || self.rollouts.minGroupSize >= 2 "
            "|| !(self.algorithm.advantage in ['grpo', 'rloo'])",
            "spec.rollouts.minGroupSize must be at least 2 with advantage grpo or rloo, which compare within a group",
            "raise minGroupSize (and groupSize where it is 1), or use reinforce++-baseline",
            field=".rollouts.minGroupSize",
        ),
        Rule(
            "self.trainer.backend == 'collect' || (self.trainer.device == 'cpu') == (self.trainer.gpusPerNode == 0)",
            "spec.trainer.gpusPerNode must be 0 with device: cpu and at least 1 with device: cuda",
            "set trainer.gpusPerNode to the number of GPUs of a node, or trainer.device: cpu and gpusPerNode: 0",
            field=".trainer.gpusPerNode",
        ),
        Rule(
            "self.trainer.backend != 'collect' || self.trainer.gpusPerNode == 0",
            "spec.trainer.gpusPerNode must be 0 with backend: collect, which makes no updates",
            "remove gpusPerNode, or use backend: verl",
            field=".trainer.gpusPerNode",
        ),
        Rule(
            "(self.inference.backend == 'cpu') == (self.inference.gpusPerReplica == 0)",
            "spec.inference.gpusPerReplica must be 0 with backend: cpu and at least 1 with backend: vllm",
            "set inference.gpusPerReplica to the number of GPUs of a server, or inference.backend: cpu",
            field=".inference.gpusPerReplica",
        ),
        Rule(
            "self.validation.every == 0 || has(self.tasks.validation)",
            "spec.validation.every needs spec.tasks.validation",
            "name the tasks to validate on, or set validation.every: 0",
            field=".validation.every",
        ),
        Rule(
            "has(self.managedBy) == has(oldSelf.managedBy) "
            "&& (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
            "spec.managedBy cannot change",
            "delete the run and create it anew",
            field=".managedBy",
        ),
    )

    policies: list[Policy] = Field(
        min_length=1,
        max_length=8,
        description="Models that agents may call: trained ones and frozen ones.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    tasks: Tasks = Field(description="What the agent works on.")
    rollouts: Rollouts = Field(description="How rollouts are drawn.")
    algorithm: Algorithm = Field(default_factory=Algorithm, description="How rollouts become updates.")
    trainer: Trainer = Field(default_factory=Trainer, description="What trains, and on what.")
    inference: Inference = Field(default_factory=Inference, description="The policy servers.")
    gateway: Gateway = Field(default_factory=Gateway, description="The gateway between agents and models.")
    traces: Traces = Field(default_factory=Traces, description="The record of every call.")
    storage: Storage | None = Field(
        None,
        description="Object storage. Absent: in a cluster that of the installation, which must have one; in a local "
        "run the run folder.",
    )
    steps: int = Field(ge=1, le=1_000_000, description="Steps of the run; each is one batch of rollouts.")
    seed: int = Field(0, ge=0, le=2_147_483_647, description="Seed of the order of tasks, of sampling and of training.")
    validation: Validation = Field(default_factory=Validation, description="When and how the policy is validated.")
    checkpoints: Checkpoints = Field(default_factory=Checkpoints, description="What is written down, and how often.")
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy, description="What ends the run as failed.")
    suspend: bool = Field(
        False, description="True: write a resumable checkpoint and end all pods; false again: go on from it."
    )
    managed_by: Token | None = Field(
        None, description="Controller that carries the run out, if not Kitestring's operator. Cannot change."
    )
    scheduling: Scheduling = Field(default_factory=Scheduling, description="How a cluster admits the run.")
    active_deadline_seconds: Seconds | None = Field(
        None, description="Seconds after its start at which a run is ended as failed; absent: never."
    )
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=31_536_000, description="Seconds after its end at which the resource is deleted; absent: never."
    )

    @property
    def trained_policies(self) -> tuple[Policy, ...]:
        """The policies that are trained, in the order of the spec."""
        return tuple(policy for policy in self.policies if policy.train)

    @property
    def frozen_policies(self) -> tuple[Policy, ...]:
        """The policies that are only called, in the order of the spec."""
        return tuple(policy for policy in self.policies if not policy.train)


def _unchanged(path: str) -> str:
    """CEL: the field at `path` of the spec is as it was, or absent as it was."""
    now, before = f"self.spec.{path}", f"oldSelf.spec.{path}"
    return f"(has({now}) == has({before}) && (!has({now}) || {now} == {before}))"


def _fixed_once_started(section: str, fields: tuple[str, ...] = (), *, remedy: str) -> Rule:
    """The rule that `spec.<section>`, or only these `fields` of it, stays as it was when the run started."""
    paths = [f"{section}.{field}" for field in fields] or [section]
    what = f"spec.{section}" + (f" ({', '.join(fields)})" if fields else "")
    return Rule(
        "!has(oldSelf.status) || !has(oldSelf.status.startTime) || (" + " && ".join(map(_unchanged, paths)) + ")",
        f"{what} cannot change once the run has started",
        remedy,
        field=f".spec.{section}",
        reason="FieldValueForbidden",
    )


class TrainingRun(ApiModel):
    """A model trained by reinforcement on what an agent does with it."""

    rules = (
        *(
            _fixed_once_started(
                section, remedy="make a new run; policies[].model.checkpointOf starts it from a checkpoint of this one"
            )
            for section in (
                "policies",
                "tasks",
                "rollouts",
                "algorithm",
                "trainer",
                "traces",
                "storage",
                "seed",
                "validation",
                "checkpoints",
            )
        ),
        _fixed_once_started(
            "inference",
            ("backend", "gpusPerReplica", "image", "extraArgs", "threads", "resources", "template"),
            remedy="change replicas only, or make a new run",
        ),
        _fixed_once_started(
            "gateway", ("resources", "template", "holdSeconds"), remedy="change replicas only, or make a new run"
        ),
        Rule(
            "!has(oldSelf.status) || !has(oldSelf.status.step) || self.spec.steps == oldSelf.spec.steps "
            "|| self.spec.steps >= oldSelf.status.step",
            "spec.steps must not be less than the steps that are done",
            "set it to status.step to end the run now, or to more",
            field=".spec.steps",
        ),
        Rule(
            "!has(oldSelf.status) || !has(oldSelf.status.startTime) || oldSelf.spec.suspend "
            "|| self.spec.scheduling == oldSelf.spec.scheduling",
            "spec.scheduling cannot change while the run holds its pods",
            "set suspend: true first, then change it",
            field=".spec.scheduling",
            reason="FieldValueForbidden",
        ),
    )

    plural: ClassVar[str] = "trainingruns"

    api_version: Literal["kitestring.dev/v1alpha1"] = Field(description="Version of this API.")
    kind: Literal["TrainingRun"] = Field(description="Kind of the resource.")
    metadata: ObjectMeta = Field(description="Name, namespace, labels.")
    spec: TrainingRunSpec = Field(description="What is wanted.")
    status: TrainingRunStatus | None = Field(None, description="What is; written by the operator.")
