"""What a run on this machine is made of: one TrainingRun, its pool, and what their references stand for.

Paths are relative to the folder of the file that names them. A reference that no document of the files resolves is an
error whose remedy names the `--set` that gives the value.
"""

from __future__ import annotations

import base64
import binascii
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kitestring_api.v1alpha1.pod_template import EnvVariable
from kitestring_api.v1alpha1.policies import Policy
from kitestring_api.v1alpha1.references import KeyReference
from kitestring_api.v1alpha1.rollout_pool import RolloutPool
from kitestring_api.v1alpha1.tasks import TaskSource
from kitestring_api.v1alpha1.training_run import TrainingRun


class UnresolvedError(Exception):
    """Something the files name is not there. `problems` has a line each: field, found, remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class References:
    """Values of the ConfigMaps and Secrets in the files: name → key → value."""

    config_maps: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, documents: Sequence[Mapping[str, Any]]) -> References:
        """From the raw documents of the files; other kinds are passed over."""
        maps = {_name(d): dict(d.get("data") or {}) for d in documents if d.get("kind") == "ConfigMap"}
        secrets = {_name(d): _secret_values(d) for d in documents if d.get("kind") == "Secret"}
        return cls(maps, secrets)


@dataclass(frozen=True)
class LocalTasks:
    """Task rows on this machine: a file, or the rows themselves."""

    path: Path | None
    rows: tuple[dict[str, Any], ...] | None
    format: str | None
    limit: int | None


@dataclass(frozen=True)
class FrozenService:
    """A frozen model: an OpenAI-compatible endpoint; `api_key` None where it needs none."""

    name: str
    url: str
    model: str
    aliases: tuple[str, ...]
    api_key: str | None


@dataclass(frozen=True)
class LocalRun:
    """A run, resolved for this machine."""

    training_run: TrainingRun
    pool: RolloutPool
    model: Path
    policy: Policy
    train: LocalTasks
    validation: LocalTasks | None
    frozen: tuple[FrozenService, ...]
    agent_environment: Mapping[str, str]
    working_folder: Path
    storage_credentials: tuple[str, str] | None
    """(access key id, secret access key) of `spec.storage`; None: no storage given, the run folder holds everything."""
    not_applied: tuple[str, ...]
    """Fields that mean something in a cluster only."""


def resolve(
    training_run: TrainingRun, pool: RolloutPool, references: References, folders: tuple[Path, Path]
) -> LocalRun:
    """`folders` are those of the files of run and pool. Raises UnresolvedError with everything that is missing."""
    resolver = _Resolver(references, training_run.metadata.name or "")
    spec = training_run.spec
    run_folder, pool_folder = folders
    policy = spec.trained_policies[0] if spec.trained_policies else spec.policies[0]
    agent = pool.spec.template.agent
    model = resolver.model(policy, spec.policies.index(policy), run_folder)
    train = resolver.tasks(spec.tasks.train, "spec.tasks.train", run_folder)
    held_out = spec.tasks.validation
    validation = resolver.tasks(held_out, "spec.tasks.validation", run_folder) if held_out is not None else None
    frozen = [resolver.frozen(p, i) for i, p in enumerate(spec.policies) if not p.train and p.endpoint is not None]
    environment = resolver.environment(agent.env, pool.metadata.name or "")
    working_folder = resolver.working_folder(agent.working_dir, pool, pool_folder)
    resolver.program(agent.command[0], working_folder, pool)
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
        working_folder=working_folder,
        storage_credentials=credentials,
        not_applied=tuple(_not_applied(training_run, pool)),
    )


class _Resolver:
    """Collects every problem instead of stopping at the first."""

    def __init__(self, references: References, run: str) -> None:
        self._references = references
        self._run = run
        self.problems: list[str] = []

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
            return LocalTasks(None, tuple(source.inline), None, source.limit)
        if source.config_map is not None:
            text = self._value(
                self._references.config_maps, "ConfigMap", source.config_map, f"{field}.configMap", field
            )
            return LocalTasks(None, _json_lines(text), None, source.limit) if text else LocalTasks(None, (), None, None)
        if source.path is None:
            kind = "s3" if source.s3 else "pvc"
            self._missing(
                f"{field}.{kind}", "tasks elsewhere", f"a file: --set {field}.path=FILE --set {field}.{kind}=null"
            )
            return LocalTasks(folder, None, None, None)
        path = (folder / source.path).resolve()
        if not path.is_file():
            self._missing(f"{field}.path", f"{path}: no such file", f"a JSONL or Parquet file; --set {field}.path=FILE")
        return LocalTasks(path, None, source.format, source.limit)

    def frozen(self, policy: Policy, index: int) -> FrozenService:
        endpoint = policy.endpoint
        assert endpoint is not None
        key = None
        if endpoint.api_key_secret_ref is not None:
            field = f"spec.policies[{index}].endpoint.apiKeySecretRef"
            key = self._value(self._references.secrets, "Secret", endpoint.api_key_secret_ref, field, field)
        return FrozenService(policy.name, endpoint.url, endpoint.model, tuple(policy.aliases), key)

    def environment(self, variables: Sequence[EnvVariable], pool: str) -> dict[str, str]:
        values: dict[str, str] = {}
        for index, variable in enumerate(variables):
            field = f"RolloutPool/{pool}:spec.template.spec.containers[agent].env[{index}].valueFrom"
            source = variable.value_from
            if source is None:
                values[variable.name] = variable.value or ""
            elif source.secret_key_ref is not None:
                values[variable.name] = self._value(
                    self._references.secrets, "Secret", source.secret_key_ref, field, field
                )
            elif source.config_map_key_ref is not None:
                values[variable.name] = self._value(
                    self._references.config_maps, "ConfigMap", source.config_map_key_ref, field, field
                )
            else:
                self._missing(field, "a source that only a cluster has", f"give `value` for {variable.name} instead")
        return values

    def working_folder(self, working_dir: str | None, pool: RolloutPool, folder: Path) -> Path:
        path = (folder / (working_dir or ".")).resolve()
        if not path.is_dir():
            field = f"RolloutPool/{pool.metadata.name}:spec.template.spec.containers[agent].workingDir"
            self._missing(field, f"{path}: no such folder", "a folder of this machine, or leave it out")
        return path

    def program(self, program: str, folder: Path, pool: RolloutPool) -> None:
        at = folder / program if "/" in program else None
        if (at is not None and at.is_file()) or (at is None and shutil.which(program)):
            return
        field = f"RolloutPool/{pool.metadata.name}:spec.template.spec.containers[agent].command"
        self._missing(field, f"{program}: no such program", f"one of this machine, below {folder} or in PATH")

    def storage(self, training_run: TrainingRun) -> tuple[str, str] | None:
        storage = training_run.spec.storage
        if storage is None:
            return None
        reference = storage.credentials_secret_ref
        if reference is None or reference.name not in self._references.secrets:
            remedy = "add the Secret to the files, or keep everything in the run folder: --set spec.storage=null"
            self._missing("spec.storage.credentialsSecretRef", "no such Secret in the files", remedy)
            return None
        secret = self._references.secrets[reference.name]
        if missing := [key for key in ("accessKeyId", "secretAccessKey") if key not in secret]:
            self._missing("spec.storage.credentialsSecretRef", f"Secret {reference.name} without {missing}", "add them")
            return None
        return secret["accessKeyId"], secret["secretAccessKey"]

    def _value(
        self, values: Mapping[str, Mapping[str, str]], kind: str, reference: KeyReference, field: str, settable: str
    ) -> str:
        if reference.name not in values:
            self._missing(field, f"{kind} {reference.name} is in none of the files", f"add it, or --set {settable}=…")
            return ""
        if reference.key not in values[reference.name]:
            keys = ", ".join(sorted(values[reference.name])) or "none"
            self._missing(field, f"{kind} {reference.name} has no key {reference.key}", f"allowed: {keys}")
            return ""
        return values[reference.name][reference.key]

    def _missing(self, field: str, found: str, remedy: str) -> None:
        self.problems.append(f"{field}: found {found}; {remedy}")


def _not_applied(training_run: TrainingRun, pool: RolloutPool) -> Iterator[str]:
    """Fields of the files that mean something in a cluster only, in the order of the files."""
    spec, agent = training_run.spec, pool.spec.template.agent
    pod = pool.spec.template.spec
    for field, value in {
        "spec.trainer.image": spec.trainer.image,
        "spec.trainer.template": spec.trainer.template,
        "spec.inference.image": spec.inference.image,
        "spec.inference.template": spec.inference.template,
        "spec.gateway.template": spec.gateway.template,
        "spec.scheduling": spec.scheduling.queue_name or spec.scheduling.priority_class_name,
        "spec.managedBy": spec.managed_by,
        "spec.suspend": spec.suspend,
        "spec.ttlSecondsAfterFinished": spec.ttl_seconds_after_finished,
        "RolloutPool spec.allowedImages": pool.spec.allowed_images,
        "RolloutPool spec.template.metadata": pool.spec.template.metadata,
        "RolloutPool spec.template.spec.containers[agent].image": agent.image,
    }.items():
        if value:
            yield field
    if spec.traces.collector.kind != "builtin":
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


def _name(document: Mapping[str, Any]) -> str:
    return str((document.get("metadata") or {}).get("name", ""))


def _secret_values(document: Mapping[str, Any]) -> dict[str, str]:
    values = dict(document.get("stringData") or {})
    for key, encoded in (document.get("data") or {}).items():
        try:
            values.setdefault(key, base64.b64decode(encoded, validate=True).decode())
        except (binascii.Error, UnicodeDecodeError, TypeError) as error:
            raise UnresolvedError([f"Secret {_name(document)} data.{key}: no base64 of text ({error})"]) from error
    return values


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
