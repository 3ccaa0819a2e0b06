"""RolloutPool: an agent, how it is run and scored, and how much of it may run at once."""

from typing import ClassVar, Literal

from pydantic import Field

from kitestring_api.v1alpha1.agent_protocol import AgentProtocol
from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.limits import Attempts, Limits
from kitestring_api.v1alpha1.metadata import ObjectMeta
from kitestring_api.v1alpha1.network import Network
from kitestring_api.v1alpha1.per_task import PerTask
from kitestring_api.v1alpha1.pod_template import PodTemplate
from kitestring_api.v1alpha1.reward import ContainerScorer, Reward
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import Text
from kitestring_api.v1alpha1.status import RolloutPoolStatus


class RolloutPoolSpec(ApiModel):
    """An agent: its container, how a task reaches it, who scores it, its limits, and how many of it run."""

    rules = (
        Rule(
            "self.trust != 'strict' || self.isolation == 'Job' || self.rolloutsPerWorker == 1",
            "spec.rolloutsPerWorker must be 1 with trust: strict, because rollouts in one container share a user",
            "set rolloutsPerWorker: 1, isolation: Job, or trust: standard",
            field=".rolloutsPerWorker",
        ),
        Rule(
            "size(self.allowedImages) == 0 || self.isolation == 'Job'",
            "spec.allowedImages has no meaning with isolation: Worker, where all rollouts use the template's image",
            "remove allowedImages, or set isolation: Job",
            field=".allowedImages",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.isolation == 'Job' || (!has(self.perTask.imageField) && !has(self.perTask.resourcesField))",
            "spec.perTask has no meaning with isolation: Worker, where rollouts of several tasks share a pod",
            "remove perTask, or set isolation: Job",
            field=".perTask",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.perTask.imageField) || size(self.allowedImages) > 0",
            "spec.allowedImages must not be empty with spec.perTask.imageField",
            "list the images that tasks may ask for, e.g. allowedImages: [registry.example/agents/*]",
            field=".allowedImages",
            reason="FieldValueRequired",
        ),
        Rule(
            "size(self.agentProtocol.preload) == 0 || self.template.spec.containers.all(c, c.name != 'agent' "
            "|| (size(c.command) > 0 && c.command[0].matches('^(.*/)?python[0-9.]*$')))",
            "spec.agentProtocol.preload needs a command that starts with a Python interpreter",
            "remove preload, or write e.g. command: [python, agent.py]",
            field=".agentProtocol.preload",
        ),
    )

    replicas: int = Field(
        1,
        ge=0,
        le=10_000,
        description="How much runs at once, for each run that uses the pool: worker pods (isolation: Worker) or Jobs "
        "(isolation: Job). `kubectl scale` changes it.",
    )
    rollouts_per_worker: int = Field(
        4, ge=1, le=256, description="Rollouts at once in one worker; has no meaning with isolation: Job."
    )
    isolation: Literal["Worker", "Job"] = Field(
        "Worker", description="Worker: pods that pull rollouts, several at once. Job: one Job per rollout."
    )
    trust: Literal["standard", "strict"] = Field(
        "standard", description="strict: refuse what puts two rollouts behind one wall."
    )
    allowed_images: list[Text] = Field(
        default_factory=list,
        max_length=256,
        description="Images that a task may ask for (isolation: Job); `*` at the end matches any rest.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    per_task: PerTask = Field(
        default_factory=PerTask, description="What a task may say about the pod of its rollout (isolation: Job)."
    )
    template: PodTemplate = Field(description="The pod of the agent; its container `agent` is yours.")
    network: Network = Field(default_factory=Network, description="What agents may reach beside the gateway and DNS.")
    agent_protocol: AgentProtocol = Field(
        default_factory=AgentProtocol, description="How a task reaches the agent, and what is read back."
    )
    reward: Reward = Field(description="Who may score a rollout.")
    limits: Limits = Field(default_factory=Limits, description="What one attempt may use.")
    attempts: Attempts = Field(default_factory=Attempts, description="How often a rollout is tried.")


def _fixed_while_used(section: str, same: str = "", but: str = "") -> Rule:
    """The rule that `spec.<section>`, which every pool has by default, stays as it is while runs use the pool:
    from their start to their end.

    `same`: CEL for it, where a part of it may change, which `but` names.
    """
    return Rule(
        "!has(oldSelf.status) || !has(oldSelf.status.runs) || oldSelf.status.runs == 0 "
        f"|| {same or f'self.spec.{section} == oldSelf.spec.{section}'}",
        f"spec.{section}{but} cannot change while runs use the pool",
        "wait until status.runs is 0 or delete the runs in status.users, or make a second pool for the next run",
        field=f".spec.{section}",
        reason="FieldValueForbidden",
    )


def _alike(place: str, model: type[ApiModel], but: str) -> str:
    """CEL: every field of the model at `place` is as it was, or was and is not there, except the field `but`."""
    fields = (f"{place}.{field.alias}" for field in model.model_fields.values() if field.alias != but)
    return " && ".join(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
        for field in fields
    )


_SCORER = "spec.reward.scorer"
_SAME_REWARD = (
    f"({_alike('spec.reward', Reward, 'scorer')} && has(self.{_SCORER}) == has(oldSelf.{_SCORER}) "
    f"&& (!has(self.{_SCORER}) || ({_alike(_SCORER, ContainerScorer, 'replicas')})))"
)


class RolloutPool(ApiModel):
    """An agent, how it is run and scored, and how much of it may run at once."""

    rules = (
        *(
            _fixed_while_used(section)
            for section in ("isolation", "trust", "allowedImages", "perTask", "template", "agentProtocol")
        ),
        _fixed_while_used("reward", _SAME_REWARD, ", scorer.replicas aside,"),
        *(_fixed_while_used(section) for section in ("limits", "attempts")),
    )

    plural: ClassVar[str] = "rolloutpools"

    api_version: Literal["kitestring.dev/v1alpha1"] = Field(description="Version of this API.")
    kind: Literal["RolloutPool"] = Field(description="Kind of the resource.")
    metadata: ObjectMeta = Field(description="Name, namespace, labels.")
    spec: RolloutPoolSpec = Field(description="What is wanted.")
    status: RolloutPoolStatus | None = Field(None, description="What is; written by the operator.")
