"""Checks that CEL in a CRD cannot make: regular expressions, and what a run and its pool must agree about.

Pure functions on typed documents. The command line reports what they find; the operator sets a condition from it.
"""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_api.v1alpha1.network import Destination

FieldPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Inconsistency:
    """Something in the document of `kind` that cannot be right, or with `severity="note"` is probably not meant."""

    kind: Literal["TrainingRun", "RolloutPool"]
    path: FieldPath
    found: str
    requires: str
    remedy: str
    severity: Literal["error", "note"] = "error"


def of_run(run: TrainingRun) -> Iterator[Inconsistency]:
    """What is wrong with a run by itself."""
    trainer = run.spec.trainer
    if trainer.backend == "collect" and trainer.overrides:
        yield Inconsistency(
            "TrainingRun",
            ("spec", "trainer", "overrides"),
            ", ".join(trainer.overrides),
            "has no meaning with backend: collect",
            "remove overrides, or use backend: verl",
        )
    for split in ("train", "validation"):
        source = getattr(run.spec.tasks, split)
        if source is None or source.path is None or source.format is not None:
            continue
        if not source.path.endswith((".jsonl", ".parquet")):
            yield Inconsistency(
                "TrainingRun",
                ("spec", "tasks", split, "path"),
                source.path,
                "must end in .jsonl or .parquet, or its format must be given",
                "add format: jsonl or format: parquet",
            )


def of_pool(pool: RolloutPool) -> Iterator[Inconsistency]:
    """What is wrong with a pool by itself."""
    builtin = pool.spec.reward.builtin
    if builtin is not None and builtin.pattern is not None:
        try:
            re.compile(builtin.pattern)
        except re.error as error:
            yield Inconsistency(
                "RolloutPool",
                ("spec", "reward", "builtin", "pattern"),
                builtin.pattern,
                f"must be a regular expression of Python: {error}",
                "correct the expression",
            )
    for index, destination in enumerate(pool.spec.network.egress):
        yield from _ranges(destination, ("spec", "network", "egress", index))
    scorer = pool.spec.reward.scorer
    for index, destination in enumerate(scorer.network.egress if scorer is not None else ()):
        yield from _ranges(destination, ("spec", "reward", "scorer", "network", "egress", index))


def _ranges(destination: Destination, path: FieldPath) -> Iterator[Inconsistency]:
    """The ranges of addresses of a destination, which a NetworkPolicy must be able to say."""
    if destination.cidr is None:
        return
    whole = _range_of(destination.cidr)
    if isinstance(whole, str):
        yield _no_range((*path, "cidr"), destination.cidr, whole)
        return
    for number, text in enumerate(destination.except_):
        part, where = _range_of(text), (*path, "except", number)
        if isinstance(part, str):
            yield _no_range(where, text, part)
        elif part.version != whole.version or part == whole or not part.subnet_of(whole):  # type: ignore[arg-type]
            yield Inconsistency(
                "RolloutPool", where, text, f"must lie within cidr {whole}", "correct the range, or remove it"
            )


def _range_of(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | str:
    """The range that `text` names, or why it names none."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        return str(error)


def _no_range(path: FieldPath, found: str, why: str) -> Inconsistency:
    return Inconsistency(
        "RolloutPool", path, found, f"must be a range of addresses: {why}", "write e.g. 10.0.0.0/8 or fd00::/8"
    )


def of_run_and_pool(run: TrainingRun, pool: RolloutPool) -> Iterator[Inconsistency]:
    """What is wrong with a run and the pool it refers to, taken together."""
    yield from _hidden_fields(run, pool)
    yield from _inline_rows(run, pool)
    frozen = [policy.name for policy in run.spec.frozen_policies]
    for name in pool.spec.limits.frozen_tokens:
        if name not in frozen:
            yield Inconsistency(
                "RolloutPool",
                ("spec", "limits", "frozenTokens", name),
                name,
                f"must name a frozen policy of the run {run.metadata.name}: {', '.join(frozen) or 'it has none'}",
                "correct the name, or remove the entry",
            )


def _hidden_fields(run: TrainingRun, pool: RolloutPool) -> Iterator[Inconsistency]:
    """The field that the agent gets must be visible to it; the one that holds the answer must not."""
    tasks = run.spec.tasks
    text_field = pool.spec.agent_protocol.task.field
    if text_field is not None and not _is_visible(run, text_field):
        yield Inconsistency(
            "RolloutPool",
            ("spec", "agentProtocol", "task", "field"),
            text_field,
            f"must be a visible field of the tasks of run {run.metadata.name}",
            "name another field, or make this one visible in spec.tasks of the run",
        )
    for name, field in _answer_fields(pool):
        if _is_visible(run, field):
            yield Inconsistency(
                "TrainingRun",
                ("spec", "tasks", "hiddenFields"),
                ", ".join(tasks.hidden_fields) or "nothing hidden",
                f"should hide {field}: {name} of the pool compares with it, and the agent could read it",
                f"add {field} to hiddenFields",
                severity="note",
            )


def _inline_rows(run: TrainingRun, pool: RolloutPool) -> Iterator[Inconsistency]:
    """Rows that stand in the run itself must have the fields that the pool names."""
    wanted = [field for _, field in _answer_fields(pool)]
    if pool.spec.agent_protocol.task.field is not None:
        wanted.append(pool.spec.agent_protocol.task.field)
    for split in ("train", "validation"):
        source = getattr(run.spec.tasks, split)
        rows = source.inline if source is not None else None
        for index, row in enumerate(rows or ()):
            for field in wanted:
                if field not in row:
                    yield Inconsistency(
                        "TrainingRun",
                        ("spec", "tasks", split, "inline", index),
                        ", ".join(row) or "no field",
                        f"must have the field {field}, which the pool {pool.metadata.name} names",
                        f"add {field} to the row, or correct the name in the pool",
                    )


def _answer_fields(pool: RolloutPool) -> list[tuple[str, str]]:
    """(field of the pool, field of the task rows it names) for fields that only a scorer should see."""
    builtin = pool.spec.reward.builtin
    if builtin is None:
        return []
    named = (
        ("reward.builtin.expectedField", builtin.expected_field),
        ("reward.builtin.patternField", builtin.pattern_field),
    )
    return [(name, field) for name, field in named if field is not None]


def _is_visible(run: TrainingRun, field: str) -> bool:
    tasks = run.spec.tasks
    if field in tasks.hidden_fields:
        return False
    return tasks.visible_fields is None or field in tasks.visible_fields
