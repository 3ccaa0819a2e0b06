"""What a run on this machine is made of: one TrainingRun, its pool, and what their references stand for.

Paths are relative to the folder of the file that names them. A reference that no document of the files resolves is an
error whose remedy names the `--set` that gives the value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kitestring_api.v1alpha1.pod_template import EnvVariable
from kitestring_api.v1alpha1.policies import Policy
from kitestring_api.v1alpha1.references import KeyReference
from kitestring_api.v1alpha1.rollout_pool import RolloutPool
from kitestring_api.v1alpha1.tasks import TaskSource
from kitestring_api.v1alpha1.training_run import TrainingRun
from kitestring_cli.documents import Documents


class UnresolvedError(Exception):
    """Something the files name is not there. `problems` has a line each: field, found, remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class LocalTasks:
    """Task rows on this machine: a file, or rows of a ConfigMap; both None: they stand inline in the spec."""

    path: Path | None = None
    rows: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class FrozenService:
    """A frozen model: an OpenAI-compatible endpoint; `api_key` None where it needs none."""

    name: str
    url: str
    model: str
    aliases: tuple[str, ...]
    api_key: str | None


@dataclass(frozen=True)
class LocalScorer:
    """The pool's scorer container as a process."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    secrets: Mapping[str, str]
    """Variables whose values come from Secrets."""
    working_folder: Path


@dataclass(frozen=True)
class LocalRun:
    """A run, resolved for this machine."""

    training_run: TrainingRun
    pool: RolloutPool
    policy: Policy
    """The one that agents get as their model: the trained one, or the first where nothing is trained."""
    model: Path | None
    """Hugging Face folder of the policy; None: an endpoint serves it."""
    train: LocalTasks
    validation: LocalTasks | None
    frozen: tuple[FrozenService, ...]
    agent_environment: Mapping[str, str]
    agent_secrets: Mapping[str, str]
    """Variables of the agent whose values come from Secrets: they go into files of their own, never into a config."""
    working_folder: Path
    scorer: LocalScorer | None
    """None: the pool has none of its own."""
    storage_credentials: tuple[str, str] | None
    """(access key id, secret access key) of `spec.storage`; None: no storage given, the run folder holds everything."""
    not_applied: tuple[str, ...]
    """Fields that mean something in a cluster only."""


def resolve(training_run: TrainingRun, pool: RolloutPool, documents: Documents) -> LocalRun:
    """Raises UnresolvedError with everything that is missing."""
    resolver = _Resolver(documents)
    spec = training_run.spec
    run_folder = _folder_of(training_run, documents)
    pool_folder = _folder_of(pool, documents)
    resolver.serving(training_run)
    resolver.walls(pool)
    policy = spec.trained_policies[0] if spec.trained_policies else spec.policies[0]
    agent = pool.spec.template.agent
    model = resolver.model(policy, spec.policies.index(policy), run_folder) if policy.endpoint is None else None
    train = resolver.tasks(spec.tasks.train, "spec.tasks.train", run_folder)
    held_out = spec.tasks.validation
    validation = resolver.tasks(held_out, "spec.tasks.validation", run_folder) if held_out is not None else None
    frozen = [resolver.frozen(p, i) for i, p in enumerate(spec.policies) if not p.train and p.endpoint is not None]
    container = f"RolloutPool/{pool.metadata.name}:spec.template.spec.containers[agent]"
    environment, agent_secrets = resolver.environment(agent.env, container)
    working_folder = resolver.working_folder(agent.working_dir, pool, pool_folder)
    resolver.program(agent.command[0], working_folder, container)
    scorer = resolver.scorer(pool, pool_folder)
    credentials = resolver.storage(training_run)
    if resolver.problems:
        raise UnresolvedError(resolver.problems)
    return LocalRun(
        training_run=training_run,
        pool=pool,
        model=model,
        policy=policy,
        train=train,
        validation=validation,
        frozen=tuple(frozen),
        agent_environment=environment,
        agent_secrets=agent_secrets,
        working_folder=working_folder,
        scorer=scorer,
        storage_credentials=credentials,
        not_applied=tuple(_not_applied(training_run, pool)),
    )


class _Resolver:
    """Collects every problem instead of stopping at the first."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self.problems: list[str] = []

    def serving(self, training_run: TrainingRun) -> None:
        spec = training_run.spec
        if spec.inference.backend != "cpu":
            remedy = "--set spec.inference.backend=cpu --set spec.inference.gpusPerReplica=0"
            self._missing("spec.inference.backend", spec.inference.backend, f"a local run serves on the CPU: {remedy}")
        if spec.trainer.backend == "verl" and spec.trainer.device != "cpu":
            remedy = "--set spec.trainer.device=cpu --set spec.trainer.gpusPerNode=0"
            self._missing("spec.trainer.device", spec.trainer.device, f"a local run trains on the CPU: {remedy}")
        if spec.trainer.nodes > 1:
            self._missing(
                "spec.trainer.nodes", str(spec.trainer.nodes), "this machine is one node: --set spec.trainer.nodes=1"
            )

    def walls(self, pool: RolloutPool) -> None:
        if pool.spec.trust == "strict":
            remedy = "agents of a local run share your user: --set RolloutPool:spec.trust=standard where you trust them"
            self._missing(f"RolloutPool/{pool.metadata.name}:spec.trust", "strict", remedy)

    def model(self, policy: Policy, index: int, folder: Path) -> Path:
        field = f"spec.policies[{index}].model"
        if policy.model is None or policy.model.path is None:
            kind = next((k for k, v in policy.model or () if v is not None), "endpoint") if policy.model else "endpoint"
            self._missing(f"{field}.{kind}", "a model elsewhere", f"give a folder: --set {field}.path=FOLDER")
            return folder
        path = (folder / policy.model.path).resolve()
        if not (path / "config.json").is_file():
            found = "a folder without config.json" if path.is_dir() else "no such folder"
            self._missing(f"{field}.path", f"{path}: {found}", f"a Hugging Face folder; --set {field}.path=FOLDER")
        return path

    def tasks(self, source: TaskSource, field: str, folder: Path) -> LocalTasks:
        if source.inline is not None:
            return LocalTasks()
        if source.config_map is not None:
            text = self._value("ConfigMap", source.config_map, f"{field}.configMap")
            return LocalTasks(rows=_json_lines(text))
        if source.path is None:
            kind = "s3" if source.s3 else "pvc"
            self._missing(
                f"{field}.{kind}", "tasks elsewhere", f"a file: --set {field}.path=FILE --set {field}.{kind}=null"
            )
            return LocalTasks(folder)
        path = (folder / source.path).resolve()
        if not path.is_file():
            self._missing(f"{field}.path", f"{path}: no such file", f"a JSONL or Parquet file; --set {field}.path=FILE")
        return LocalTasks(path)

    def frozen(self, policy: Policy, index: int) -> FrozenService:
        endpoint = policy.endpoint
        assert endpoint is not None
        key = None
        if endpoint.api_key_secret_ref is not None:
            field = f"spec.policies[{index}].endpoint.apiKeySecretRef"
            key = self._value("Secret", endpoint.api_key_secret_ref, field)
        return FrozenService(policy.name, endpoint.url, endpoint.model, tuple(policy.aliases), key)

    def environment(self, variables: Sequence[EnvVariable], container: str) -> tuple[dict[str, str], dict[str, str]]:
        """Values that stand in the files or in ConfigMaps, and those of Secrets. `container`: the field of it."""
        values: dict[str, str] = {}
        secrets: dict[str, str] = {}
        for index, variable in enumerate(variables):
            field = f"{container}.env[{index}].valueFrom"
            source = variable.value_from
            if source is None:
                values[variable.name] = variable.value or ""
            elif source.secret_key_ref is not None:
                secrets[variable.name] = self._value("Secret", source.secret_key_ref, field)
            elif source.config_map_key_ref is not None:
                values[variable.name] = self._value("ConfigMap", source.config_map_key_ref, field)
            else:
                self._missing(field, "a source that only a cluster has", f"give `value` for {variable.name} instead")
        return values, secrets

    def working_folder(self, working_dir: str | None, pool: RolloutPool, folder: Path) -> Path:
        path = (folder / (working_dir or ".")).resolve()
        if not path.is_dir():
            field = f"RolloutPool/{pool.metadata.name}:spec.template.spec.containers[agent].workingDir"
            self._missing(field, f"{path}: no such folder", "a folder of this machine, or leave it out")
        return path

    def program(self, program: str, folder: Path, container: str) -> None:
        at = folder / program if "/" in program else None
        if (at is not None and at.is_file()) or (at is None and shutil.which(program)):
            return
        self._missing(
            f"{container}.command", f"{program}: no such program", f"one of this machine, below {folder} or in PATH"
        )

    def scorer(self, pool: RolloutPool, folder: Path) -> LocalScorer | None:
        """The scorer container of the pool, if it has one, in the folder of the pool's file."""
        scorer, container = pool.spec.reward.scorer, f"RolloutPool/{pool.metadata.name}:spec.reward.scorer"
        if scorer is None:
            return None
        environment, secrets = self.environment(scorer.env, container)
        if scorer.command:
            self.program(scorer.command[0], folder, container)
        else:
            remedy = "a local run starts no image: write what it would start, e.g. command: [python, judge.py]"
            self._missing(f"{container}.command", "nothing", remedy)
        return LocalScorer((*scorer.command, *scorer.args), environment, secrets, folder)

    def storage(self, training_run: TrainingRun) -> tuple[str, str] | None:
        storage = training_run.spec.storage
        if storage is None:
            return None
        reference = storage.credentials_secret_ref
        if reference is None:
            remedy = "name a Secret, or keep everything in the run folder: --set spec.storage=null"
            self._missing("spec.storage.credentialsSecretRef", "nothing", remedy)
            return None
        field = "spec.storage.credentialsSecretRef"
        return (
            self._value("Secret", KeyReference(name=reference.name, key="accessKeyId"), field),
            self._value("Secret", KeyReference(name=reference.name, key="secretAccessKey"), field),
        )

    def _value(self, kind: Literal["ConfigMap", "Secret"], reference: KeyReference, field: str) -> str:
        found = (self._documents.secret if kind == "Secret" else self._documents.config_map)(reference.name)
        if found is None:
            self._missing(field, f"{kind} {reference.name} is in none of the files", f"add it, or --set {field}=…")
            return ""
        if reference.key not in found.values:
            keys = ", ".join(sorted(found.values)) or "none"
            self._missing(field, f"{kind} {reference.name} has no key {reference.key}", f"allowed: {keys}")
            return ""
        try:
            return found.values[reference.key].decode()
        except UnicodeDecodeError:
            self._missing(field, f"{kind} {reference.name} key {reference.key} is no text", "give text in UTF-8")
            return ""

    def _missing(self, field: str, found: str, remedy: str) -> None:
        self.problems.append(f"{field}: found {found}; {remedy}")


def _not_applied(training_run: TrainingRun, pool: RolloutPool) -> Iterator[str]:
    """Fields of the files that mean something in a cluster only, in the order of the files."""
    spec, agent = training_run.spec, pool.spec.template.agent
    pod, scorer = pool.spec.template.spec, pool.spec.reward.scorer
    for field, value in {
        "spec.trainer.image": spec.trainer.image,
        "spec.trainer.resources": spec.trainer.resources,
        "spec.trainer.template": spec.trainer.template,
        "spec.inference.image": spec.inference.image,
        "spec.inference.resources": spec.inference.resources,
        "spec.inference.template": spec.inference.template,
        "spec.gateway.resources": spec.gateway.resources,
        "spec.gateway.template": spec.gateway.template,
        "spec.traces.collector.resources": spec.traces.collector.resources,
        "spec.traces.collector.template": spec.traces.collector.template,
        "spec.storage.credentials": spec.storage and spec.storage.credentials,
        "spec.scheduling": spec.scheduling.queue_name or spec.scheduling.priority_class_name,
        "spec.managedBy": spec.managed_by,
        "spec.suspend": spec.suspend,
        "spec.ttlSecondsAfterFinished": spec.ttl_seconds_after_finished,
        "spec.inference.replicas (a local run starts one)": spec.inference.replicas > 1,
        "spec.gateway.replicas (a local run starts one)": spec.gateway.replicas > 1,
        "RolloutPool spec.allowedImages": pool.spec.allowed_images,
        "RolloutPool spec.network": pool.spec.network.egress,
        "RolloutPool spec.template.metadata": pool.spec.template.metadata,
        "RolloutPool spec.template.spec.containers[agent].image": agent.image,
        "RolloutPool spec.reward.scorer.image": scorer and scorer.image,
        "RolloutPool spec.reward.scorer.replicas (a local run starts one)": scorer and scorer.replicas > 1,
        "RolloutPool spec.reward.scorer.resources": scorer and scorer.resources,
        "RolloutPool spec.reward.scorer.network": scorer and scorer.network.egress,
        "RolloutPool spec.reward.scorer.template": scorer and scorer.template,
    }.items():
        if value:
            yield field
    if spec.traces.collector.kind == "contrib":
        yield "spec.traces.collector.kind (local runs use builtin)"
    if pool.spec.isolation == "Job":
        yield "RolloutPool spec.isolation: Job (local runs start processes)"
    for extra in sorted(pod.model_extra or {}):
        yield f"RolloutPool spec.template.spec.{extra}"
    for extra in sorted(agent.model_extra or {}):
        yield f"RolloutPool spec.template.spec.containers[agent].{extra}"
    for container in pod.containers:
        if container.name != agent.name:
            yield f"RolloutPool spec.template.spec.containers[{container.name}]"


def _folder_of(resource: TrainingRun | RolloutPool, documents: Documents) -> Path:
    """Folder of the file that holds the resource; standard input counts as the current folder."""
    file = next(document.file for document in documents.documents if document.model is resource)
    return Path(file).resolve().parent if Path(file).is_file() else Path.cwd()


def _json_lines(text: str) -> tuple[dict[str, Any], ...]:

    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UnresolvedError([f"tasks in ConfigMap, line {number}: no JSON ({error.msg})"]) from error
        rows.append(row)
    return tuple(rows)
