"""`kitestring validate`: everything that can be said about files without a cluster and without running them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kitestring_api import consistency
from kitestring_api.unsupported import refusals
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_cli.cel_rules import broken_rules
from kitestring_cli.documents import Documents, KeyValues, LoadedDocument, load
from kitestring_cli.problem import FieldPath, Problem, value_text


@dataclass(frozen=True)
class Validation:
    """What the files hold and what is wrong with them, in the order of the files."""

    documents: Documents
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that are mistakes."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there is no mistake. Notes are none."""
        return not self.errors

    def as_text(self) -> str:
        """For a reader: one line per problem, then one that sums up."""
        known = [document for document in self.documents.documents if document.model is not None]
        count = len(self.errors)
        names = ", ".join(f"{document.kind}/{document.name}" for document in known)
        if count:
            summary = f"{count} problem{'s' if count > 1 else ''} found"
        else:
            summary = f"valid: {names}" if names else "nothing to check"
        return "\n".join([*map(str, self.problems), summary])

    def as_json(self) -> str:
        """For a program: one object with `valid`, `documents` and `problems`."""
        documents = [
            {"file": document.file, "document": document.index, "kind": document.kind, "name": document.name}
            for document in self.documents.documents
        ]
        found = [problem.as_json() for problem in self.problems]
        return json.dumps({"valid": self.ok, "documents": documents, "problems": found}, ensure_ascii=False, indent=2)


def validate(paths: Sequence[str], overrides: Sequence[str] = ()) -> Validation:
    """Check files ("-": standard input) with `--set` overrides laid over them.

    In this order: YAML, schema, rules, what this version cannot carry out, what documents say about each other. A
    document that fails one of the first two is not asked the rest. Files that the documents name (models, tasks) are
    not looked at: in a cluster they lie elsewhere.
    """
    documents = load(paths, overrides)
    problems = list(documents.problems)
    for document in documents.documents:
        problems.extend(_of_document(document))
    problems.extend(_between(documents))
    order = {(document.file, document.index): place for place, document in enumerate(documents.documents)}
    problems.sort(key=lambda problem: (order.get((problem.file, problem.document or 0), -1), problem.line or 0))
    return Validation(documents, tuple(problems))


def _of_document(document: LoadedDocument) -> Iterator[Problem]:
    """Problems of one document by itself."""
    model = document.model
    if not isinstance(model, TrainingRun | RolloutPool):
        return
    for broken in broken_rules(model):
        yield document.problem(
            broken.field_path,
            "breaks a rule",
            found=_found(document, broken.field_path),
            allowed=broken.rule.requires,
            remedy=broken.rule.remedy,
        )
    for refusal in refusals(model):
        yield document.problem(
            _steps(refusal.path),
            f"not supported yet: {refusal.entry.reason}",
            found=value_text(refusal.value),
            allowed=refusal.entry.allowed,
            remedy=refusal.entry.remedy,
        )
    own = consistency.of_run(model) if isinstance(model, TrainingRun) else consistency.of_pool(model)
    yield from (_inconsistency(document, found) for found in own)


def _between(documents: Documents) -> Iterator[Problem]:
    """Problems that show only when documents are taken together. What is in no file may be in the cluster."""
    pools = {d.name: d for d in documents.documents if isinstance(d.model, RolloutPool)}
    unreadable_pools = any(d.kind == "RolloutPool" and d.model is None for d in documents.documents)
    for document in documents.documents:
        if isinstance(document.model, TrainingRun | RolloutPool):
            yield from _missing_keys(document, documents)
        if not isinstance(document.model, TrainingRun):
            continue
        run = document.model
        pool = pools.get(run.spec.rollouts.pool_ref.name)
        if pool is not None and isinstance(pool.model, RolloutPool):
            for found in consistency.of_run_and_pool(run, pool.model):
                yield _inconsistency(document if found.kind == "TrainingRun" else pool, found)
        elif pools and not unreadable_pools:
            yield document.problem(
                ("spec", "rollouts", "poolRef", "name"),
                "names no RolloutPool of these files",
                found=run.spec.rollouts.pool_ref.name,
                allowed=", ".join(pools),
                remedy="correct the name, or add the pool",
            )


_REFERENCES = {
    "configMap": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
    "secretKeyRef": "Secret",
    "apiKeySecretRef": "Secret",
    "tokenSecretRef": "Secret",
}
"""Fields that refer to a key of a ConfigMap or Secret, by their name in the API."""


def _missing_keys(document: LoadedDocument, documents: Documents) -> Iterator[Problem]:
    """References to a ConfigMap or Secret of these files that lacks the key."""
    for path, reference in _references(document.raw.get("spec"), ("spec",)):
        kind = _REFERENCES[str(path[-1])]
        name, key = reference.get("name"), reference.get("key")
        values = documents.config_map(str(name)) if kind == "ConfigMap" else documents.secret(str(name))
        if isinstance(values, KeyValues) and key is not None and key not in values.values:
            yield document.problem(
                (*path, "key"),
                f"the {kind} {name} of these files has no such key",
                found=str(key),
                allowed=", ".join(sorted(values.values)) or "it is empty",
                remedy=f"correct the key, or add it to the {kind}",
            )


def _references(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, dict[str, Any]]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in _REFERENCES and isinstance(inner, dict):
                yield (*path, key), inner
            elif key != "inline":
                yield from _references(inner, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _references(item, (*path, index))


def _inconsistency(document: LoadedDocument, found: consistency.Inconsistency) -> Problem:
    return document.problem(
        found.path,
        "cannot be right" if found.severity == "error" else "is probably not meant",
        found=found.found,
        allowed=found.requires,
        remedy=found.remedy,
        severity=found.severity,
    )


def _found(document: LoadedDocument, path: FieldPath) -> str:
    """What stands at `path` in the typed document, defaults filled in."""
    assert isinstance(document.model, TrainingRun | RolloutPool)
    value: Any = document.model.manifest()
    for step in path:
        if isinstance(value, dict):
            value = value.get(str(step))
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
    return value_text(value)


def _steps(path: str) -> FieldPath:
    """`spec.policies[1].model` as a path."""
    steps: list[str | int] = []
    for part in path.split("."):
        name, _, index = part.partition("[")
        steps.append(name)
        if index:
            steps.append(int(index.rstrip("]")))
    return tuple(steps)
