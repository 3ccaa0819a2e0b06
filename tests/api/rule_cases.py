"""For every cross-field rule: a document that breaks it and nothing else, and what mends it."""

from dataclasses import dataclass, field
from typing import Any

from tests.api.documents import ABSENT, POOL, RUN, changed

STARTED = {"startTime": "2026-01-01T00:00:00Z", "step": 3}
USED = {"runs": 1}


@dataclass(frozen=True)
class RuleCase:
    """`broken` is set in the right document, `mend` on top of it. `before` makes the old document of a change."""

    kind: str
    rule: str
    path: str
    broken: dict[str, Any]
    mend: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    is_change: bool = False

    @property
    def right(self) -> dict[str, Any]:
        return RUN if self.kind == "TrainingRun" else POOL

    @property
    def broken_document(self) -> dict[str, Any]:
        return changed(self.right, {**self._status, **self.broken})

    @property
    def mended_document(self) -> dict[str, Any]:
        return changed(self.broken_document, self.mend)

    @property
    def old_document(self) -> dict[str, Any] | None:
        return changed(self.right, {**self._status, **self.before}) if self.is_change else None

    @property
    def _status(self) -> dict[str, Any]:
        if not self.is_change:
            return {}
        return {"status": STARTED if self.kind == "TrainingRun" else USED}

    def __str__(self) -> str:
        return f"{self.kind}-{self.rule[:60]}"


def _run(rule: str, path: str, broken: dict[str, Any], mend: dict[str, Any]) -> RuleCase:
    return RuleCase("TrainingRun", rule, path, broken, mend)


def _pool(rule: str, path: str, broken: dict[str, Any], mend: dict[str, Any]) -> RuleCase:
    return RuleCase("RolloutPool", rule, path, broken, mend)


def _run_change(
    rule: str, path: str, broken: dict[str, Any], mend: dict[str, Any], before: dict[str, Any] | None = None
) -> RuleCase:
    return RuleCase("TrainingRun", rule, path, broken, mend, before or {}, is_change=True)


def _pool_change(
    rule: str, path: str, broken: dict[str, Any], mend: dict[str, Any], before: dict[str, Any] | None = None
) -> RuleCase:
    return RuleCase("RolloutPool", rule, path, broken, mend, before or {}, is_change=True)


AGENT = "spec.template.spec.containers.0"
MODEL = "spec.policies.0.model"
BUILTIN = "spec.reward.builtin"
SCORER = "spec.reward.scorer"
FIXED = "cannot change once the run has started"
USED_POOL = "cannot change while runs use the pool"

RULE_CASES = (
    # --- a run -----------------------------------------------------------------------------------------------------
    _run(
        "spec.policies needs one with train: true",
        "spec.policies",
        {"spec.policies.0": {"name": "policy", "train": False, "endpoint": {"url": "http://m.test", "model": "m"}}},
        {"spec.trainer.backend": "collect"},
    ),
    _run(
        "spec.policies[].aliases must differ",
        "spec.policies",
        {"spec.policies.1.aliases": ["gpt-4o-mini"]},
        {"spec.policies.1.aliases": ["gpt-4o"]},
    ),
    _run(
        "spec.algorithm.updatesPerStep must not",
        "spec.algorithm.updatesPerStep",
        {"spec.algorithm.updatesPerStep": 9, "spec.rollouts.tasksPerStep": 1},
        {"spec.algorithm.updatesPerStep": 8},
    ),
    _run(
        "spec.rollouts.minGroupSize must be at least 2",
        "spec.rollouts.minGroupSize",
        {"spec.rollouts.minGroupSize": 1},
        {"spec.algorithm.advantage": "reinforce++-baseline"},
    ),
    _run(
        "spec.trainer.gpusPerNode must be 0 with device: cpu",
        "spec.trainer.gpusPerNode",
        {"spec.trainer.device": "cuda"},
        {"spec.trainer.gpusPerNode": 8},
    ),
    _run(
        "spec.trainer.gpusPerNode must be 0 with backend: collect",
        "spec.trainer.gpusPerNode",
        {"spec.trainer.backend": "collect", "spec.trainer.gpusPerNode": 1},
        {"spec.trainer.gpusPerNode": 0},
    ),
    _run(
        "spec.inference.gpusPerReplica must be 0",
        "spec.inference.gpusPerReplica",
        {"spec.inference.backend": "vllm"},
        {"spec.inference.gpusPerReplica": 1},
    ),
    _run(
        "spec.inference.threads has no meaning",
        "spec.inference.threads",
        {"spec.inference": {"backend": "vllm", "gpusPerReplica": 1, "threads": 2}},
        {"spec.inference": {"backend": "cpu", "threads": 2}},
    ),
    _run(
        "spec.inference.extraArgs has no meaning",
        "spec.inference.extraArgs",
        {"spec.inference.extraArgs": ["--x"]},
        {"spec.inference": {"backend": "vllm", "gpusPerReplica": 1, "extraArgs": ["--x"]}},
    ),
    _run(
        "spec.validation.every needs",
        "spec.validation.every",
        {"spec.validation.every": 2, "spec.tasks.validation": ABSENT},
        {"spec.tasks.validation": {"inline": [{"question": "1+1", "answer": "2"}]}},
    ),
    _run(
        "spec.validation needs greedy or sampled",
        "spec.validation.sampled",
        {"spec.validation": {"greedy": False, "sampled": False}},
        {"spec.validation.greedy": True},
    ),
    _run(
        "spec.policies[].name must not be one of",
        "spec.policies[0].name",
        {"spec.policies.0.name": "gateway"},
        {"spec.policies.0.name": "gateway-model", "spec.policies.0.aliases": ["gateway"]},
    ),
    _run(
        "spec.policies[] needs exactly one of model and endpoint",
        "spec.policies[1]",
        {"spec.policies.1.endpoint": ABSENT},
        {"spec.policies.1.model": {"path": "./judge"}},
    ),
    _run(
        "spec.policies[].endpoint cannot be trained",
        "spec.policies[1].endpoint",
        {"spec.policies.1.train": True},
        {"spec.policies.1.train": False},
    ),
    _run(
        "spec.policies[].lora has no meaning",
        "spec.policies[1].lora",
        {"spec.policies.1.lora": {"rank": 8}},
        {"spec.policies.1.lora": ABSENT},
    ),
    _run(
        "spec.policies[].lora.targetModules must",
        "spec.policies[0].lora.targetModules",
        {"spec.policies.0.lora": {"targetModules": ["all-linear", "q_proj"]}},
        {"spec.policies.0.lora": {"targetModules": ["q_proj", "v_proj"]}},
    ),
    _run(
        "spec.policies[].maxModelLen and toolParser",
        "spec.policies[1].endpoint",
        {"spec.policies.1.toolParser": "hermes"},
        {"spec.policies.1.toolParser": ABSENT},
    ),
    _run(
        "spec.policies[].model needs exactly one",
        "spec.policies[0].model",
        {f"{MODEL}.checkpointOf": {"trainingRun": "earlier"}},
        {f"{MODEL}.path": ABSENT},
    ),
    _run(
        "spec.tasks.visibleFields and",
        "spec.tasks.visibleFields",
        {"spec.tasks.visibleFields": ["question", "answer"]},
        {"spec.tasks.visibleFields": ["question"]},
    ),
    _run(
        "spec.tasks.train and spec.tasks.validation need exactly one",
        "spec.tasks.train",
        {"spec.tasks.train": {"limit": 3}},
        {"spec.tasks.train": {"limit": 3, "pvc": {"claimName": "data", "path": "train.jsonl"}}},
    ),
    _run(
        "spec.tasks.*.format has no meaning with inline",
        "spec.tasks.train.format",
        {"spec.tasks.train": {"inline": [{"question": "1+1"}], "format": "jsonl"}},
        {"spec.tasks.train.format": ABSENT},
    ),
    _run(
        "spec.tasks.*.format must be jsonl with configMap",
        "spec.tasks.train.format",
        {"spec.tasks.train": {"configMap": {"name": "tasks", "key": "train"}, "format": "parquet"}},
        {"spec.tasks.train.format": "jsonl"},
    ),
    _run(
        "spec.rollouts.minGroupSize must not be greater",
        "spec.rollouts.minGroupSize",
        {"spec.rollouts.minGroupSize": 9},
        {"spec.rollouts.groupSize": 9},
    ),
    _run(
        "spec.algorithm.loss.dualClip must",
        "spec.algorithm.loss.dualClip",
        {"spec.algorithm.loss.dualClip": 1.25},
        {"spec.algorithm.loss.clipHigh": 0.2},
    ),
    # --- a change of a run -----------------------------------------------------------------------------------------
    _run_change(
        "spec.managedBy cannot change",
        "spec.managedBy",
        {"spec.managedBy": "kueue.test/b"},
        {"spec.managedBy": "kueue.test/a"},
        {"spec.managedBy": "kueue.test/a"},
    ),
    _run_change(
        f"spec.policies {FIXED}",
        "spec.policies",
        {"spec.policies.0.lora": {}},
        {"spec.policies.0.lora": ABSENT},
    ),
    _run_change(
        f"spec.tasks {FIXED}",
        "spec.tasks",
        {"spec.tasks.train.path": "b.jsonl"},
        {"spec.tasks.train.path": "train.jsonl"},
    ),
    _run_change(f"spec.rollouts {FIXED}", "spec.rollouts", {"spec.rollouts.groupSize": 4}, {"status": {}}),
    _run_change(
        f"spec.algorithm {FIXED}",
        "spec.algorithm",
        {"spec.algorithm.optimizer.learningRate": 0.1},
        {"spec.algorithm": ABSENT},
    ),
    _run_change(
        f"spec.trainer {FIXED}",
        "spec.trainer",
        {"spec.trainer.overrides": {"a.b": 2}},
        {"spec.trainer.overrides": {"a.b": 1}},
        {"spec.trainer.overrides": {"a.b": 1}},
    ),
    _run_change(
        f"spec.traces {FIXED}",
        "spec.traces",
        {"spec.traces.recordContents": False},
        {"spec.traces.recordContents": True},
    ),
    _run_change(
        f"spec.storage {FIXED}", "spec.storage", {"spec.storage": {"bucket": "runs"}}, {"spec.storage": ABSENT}
    ),
    _run_change(f"spec.seed {FIXED}", "spec.seed", {"spec.seed": 1}, {"spec.seed": 0}),
    _run_change(
        f"spec.validation {FIXED}", "spec.validation", {"spec.validation.every": 2}, {"spec.validation.every": 0}
    ),
    _run_change(
        f"spec.checkpoints {FIXED}", "spec.checkpoints", {"spec.checkpoints.keep": 9}, {"spec.checkpoints.keep": 3}
    ),
    _run_change(
        "spec.inference (backend, gpusPerReplica, image, extraArgs, threads, resources, template) cannot change",
        "spec.inference",
        {"spec.inference.threads": 2},
        {"spec.inference.threads": ABSENT, "spec.inference.replicas": 4},
    ),
    _run_change(
        "spec.gateway (resources, template, holdSeconds) cannot change",
        "spec.gateway",
        {"spec.gateway": {"replicas": 2, "template": {"metadata": {"labels": {"a": "b"}}}}},
        {"spec.gateway": {"replicas": 2}},
    ),
    _run_change("spec.steps must not be less", "spec.steps", {"spec.steps": 2}, {"spec.steps": 3}),
    _run_change(
        "spec.scheduling cannot change while",
        "spec.scheduling",
        {"spec.scheduling.queueName": "b"},
        {"spec.scheduling.queueName": "a"},
        {"spec.scheduling.queueName": "a"},
    ),
    # --- a pool ----------------------------------------------------------------------------------------------------
    _pool(
        "spec.rolloutsPerWorker must be 1",
        "spec.rolloutsPerWorker",
        {"spec.trust": "strict"},
        {"spec.isolation": "Job"},
    ),
    _pool(
        "spec.allowedImages has no meaning",
        "spec.allowedImages",
        {"spec.allowedImages": ["a/*"]},
        {"spec.isolation": "Job"},
    ),
    _pool(
        "spec.perTask has no meaning",
        "spec.perTask",
        {"spec.perTask.resourcesField": "resources"},
        {"spec.isolation": "Job"},
    ),
    _pool(
        "spec.allowedImages must not be empty",
        "spec.allowedImages",
        {"spec.isolation": "Job", "spec.perTask.imageField": "image"},
        {"spec.allowedImages": ["registry.test/agents/*"]},
    ),
    _pool(
        "spec.agentProtocol.preload needs",
        "spec.agentProtocol.preload",
        {"spec.agentProtocol.preload": ["openai"], f"{AGENT}.command": ["./agent"]},
        {f"{AGENT}.command": ["/opt/venv/bin/python3.11", "agent.py"]},
    ),
    _pool(
        "spec.template.spec.containers must hold exactly one",
        "spec.template.spec.containers",
        {f"{AGENT}.name": "main"},
        {f"{AGENT}.name": "agent"},
    ),
    _pool(
        "spec.template.spec.containers[agent].command must not be empty",
        "spec.template.spec.containers",
        {f"{AGENT}.command": ABSENT},
        {f"{AGENT}.command": ["./agent"]},
    ),
    _pool(
        "spec.template.spec.containers[agent].env must not set",
        "spec.template.spec.containers",
        {f"{AGENT}.env": [{"name": "OPENAI_API_KEY", "value": "sk-1"}]},
        {f"{AGENT}.env": [{"name": "OPENAI_MODEL", "value": "policy"}]},
    ),
    _pool(
        "spec.template.spec must not have a container called launcher or worker",
        "spec.template.spec.initContainers",
        {"spec.template.spec.initContainers": [{"name": "worker", "image": "mine"}]},
        {"spec.template.spec.initContainers.0.name": "worker-data"},
    ),
    _pool(
        "spec.template.spec.volumes must not have a name",
        "spec.template.spec.volumes",
        {"spec.template.spec.volumes": [{"name": "kitestring-keys", "emptyDir": {}}]},
        {"spec.template.spec.volumes.0.name": "cache"},
    ),
    _pool(
        "spec.template.spec must not set hostNetwork",
        "spec.template.spec",
        {"spec.template.spec.hostPID": True},
        {"spec.template.spec.hostPID": False},
    ),
    _pool(
        "spec.template.spec must not have a privileged container",
        "spec.template.spec.containers",
        {f"{AGENT}.securityContext": {"privileged": True}},
        {f"{AGENT}.securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}},
    ),
    _pool(
        "spec.template.spec must not use the user id 65532",
        "spec.template.spec",
        {"spec.template.spec.securityContext": {"runAsUser": 65532}},
        {"spec.template.spec.securityContext": {"runAsUser": 0, "runAsNonRoot": False}},
    ),
    _pool(
        "spec.template.spec.restartPolicy is Kitestring's",
        "spec.template.spec.restartPolicy",
        {"spec.template.spec.restartPolicy": "Never"},
        {"spec.template.spec.restartPolicy": ABSENT},
    ),
    _pool(
        "spec[.reward.scorer].network.egress[] needs either cidr",
        "spec.network.egress[0].cidr",
        {"spec.network.egress": [{"cidr": "10.0.0.0/8", "podSelector": {}}]},
        {"spec.network.egress.0.podSelector": ABSENT},
    ),
    _pool(
        "spec[.reward.scorer].network.egress[].except has no meaning",
        "spec.network.egress[0].except",
        {"spec.network.egress": [{"namespaceSelector": {}, "except": ["10.0.0.0/8"]}]},
        {"spec.network.egress.0.except": ABSENT},
    ),
    _pool(
        "spec[.reward.scorer].network.egress[].ports[].endPort must not",
        "spec.network.egress[0].ports[0].endPort",
        {"spec.network.egress": [{"cidr": "10.0.0.0/8", "ports": [{"port": 443, "endPort": 80}]}]},
        {"spec.network.egress.0.ports.0.endPort": 445},
    ),
    _pool(
        "spec.agentProtocol.task.field is required",
        "spec.agentProtocol.task.field",
        {"spec.agentProtocol.task.field": ABSENT},
        {"spec.agentProtocol.task.format": "json"},
    ),
    _pool(
        "spec.agentProtocol.task.field has no meaning",
        "spec.agentProtocol.task.field",
        {"spec.agentProtocol.task.format": "json"},
        {"spec.agentProtocol.task.field": ABSENT},
    ),
    _pool(
        "spec.reward.builtin is required",
        "spec.reward.builtin",
        {BUILTIN: ABSENT},
        {"spec.reward.source": "exitCode", "spec.reward.exitCode": {"success": 2}},
    ),
    _pool(
        "spec.reward.command is required",
        "spec.reward.command",
        {"spec.reward": {"source": "command"}},
        {"spec.reward.command": {"command": ["./score"]}},
    ),
    _pool(
        "spec.reward.scorer is required",
        "spec.reward.scorer",
        {"spec.reward": {"source": "scorer"}},
        {SCORER: {"image": "judge:1"}},
    ),
    _pool(
        "spec.reward.scorer.env must not",
        "spec.reward.scorer.env",
        {"spec.reward": {"source": "scorer", "scorer": {"image": "judge:1", "env": [{"name": "PORT", "value": "1"}]}}},
        {f"{SCORER}.env": [{"name": "PORT_OF_MODEL", "value": "1"}], f"{SCORER}.port": 1},
    ),
    _pool(
        "spec.reward.exitCode has no meaning",
        "spec.reward.exitCode",
        {"spec.reward.exitCode": {}},
        {"spec.reward.exitCode": ABSENT},
    ),
    _pool(
        "spec.reward.min must not",
        "spec.reward.min",
        {"spec.reward.min": 1, "spec.reward.max": 0},
        {"spec.reward.max": 1},
    ),
    _pool(
        "spec.reward.builtin.expectedField is required",
        "spec.reward.builtin.expectedField",
        {f"{BUILTIN}.expectedField": ABSENT},
        {BUILTIN: {"kind": "regex", "pattern": "^[0-9]+$"}},
    ),
    _pool(
        "spec.reward.builtin needs exactly one of pattern",
        "spec.reward.builtin.pattern",
        {BUILTIN: {"kind": "regex", "pattern": "a", "patternField": "b"}},
        {BUILTIN: {"kind": "regex", "patternField": "b"}},
    ),
    _pool(
        "spec.reward.builtin.path is required",
        "spec.reward.builtin.path",
        {f"{BUILTIN}.kind": "jsonField"},
        {f"{BUILTIN}.path": "result.answer"},
    ),
    _pool(
        "spec.reward.builtin.tolerance has no meaning",
        "spec.reward.builtin.tolerance",
        {f"{BUILTIN}.tolerance": 0.5},
        {f"{BUILTIN}.kind": "numeric"},
    ),
    # --- a change of a pool ----------------------------------------------------------------------------------------
    _pool_change(f"spec.isolation {USED_POOL}", "spec.isolation", {"spec.isolation": "Job"}, {"status": {"runs": 0}}),
    _pool_change(
        f"spec.trust {USED_POOL}",
        "spec.trust",
        {"spec.trust": "strict", "spec.rolloutsPerWorker": 1},
        {"spec.trust": "standard"},
    ),
    _pool_change(
        f"spec.allowedImages {USED_POOL}",
        "spec.allowedImages",
        {"spec.isolation": "Job", "spec.allowedImages": ["a/*", "b/*"]},
        {"spec.allowedImages": ["a/*"]},
        {"spec.isolation": "Job", "spec.allowedImages": ["a/*"]},
    ),
    _pool_change(
        f"spec.perTask {USED_POOL}",
        "spec.perTask",
        {"spec.isolation": "Job", "spec.perTask.resourcesField": "resources"},
        {"spec.perTask": ABSENT},
        {"spec.isolation": "Job"},
    ),
    _pool_change(
        f"spec.template {USED_POOL}",
        "spec.template",
        {f"{AGENT}.resources": {"limits": {"cpu": "2"}}},
        {f"{AGENT}.resources": ABSENT, "spec.replicas": 9},
    ),
    _pool_change(
        f"spec.agentProtocol {USED_POOL}",
        "spec.agentProtocol",
        {"spec.agentProtocol.task.from": "file"},
        {"spec.agentProtocol.task.from": "stdin"},
    ),
    _pool_change(
        f"spec.reward, scorer.replicas aside, {USED_POOL}",
        "spec.reward",
        {
            "spec.reward": {
                "source": "scorer",
                "scorer": {"image": "judge:1", "replicas": 3, "timeoutSeconds": 9},
            }
        },
        {f"{SCORER}.timeoutSeconds": 60},
        {"spec.reward": {"source": "scorer", "scorer": {"image": "judge:1"}}},
    ),
    _pool_change(f"spec.limits {USED_POOL}", "spec.limits", {"spec.limits.calls": 9}, {"spec.limits": ABSENT}),
    _pool_change(f"spec.attempts {USED_POOL}", "spec.attempts", {"spec.attempts.max": 9}, {"spec.attempts": ABSENT}),
)
