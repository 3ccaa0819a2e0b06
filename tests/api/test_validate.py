"""Mistakes in files: each gives one problem that says where, what was found, what is allowed, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kitestring_cli.validate import Validation, validate
from tests.api.documents import ABSENT, POOL, RUN, changed

Check = Callable[..., Validation]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Validates documents (plain data) or text, written into a file `run.yaml`."""

    def run(*documents: dict[str, Any] | str, overrides: tuple[str, ...] = ()) -> Validation:
        texts = [d if isinstance(d, str) else yaml.safe_dump(d, sort_keys=False) for d in documents]
        path = tmp_path / "run.yaml"
        path.write_text("\n---\n".join(texts))
        return validate([str(path)], overrides)

    return run


def test_right_files_have_no_problem(check: Check) -> None:
    validation = check(RUN, POOL)
    assert validation.problems == ()
    assert validation.as_text() == "valid: TrainingRun/calculator, RolloutPool/calculator"


class BadField(NamedTuple):
    """`changes` of the right document, and what its one problem says; no `path`: there is none."""

    right: dict[str, Any]
    changes: dict[str, Any]
    path: str
    found: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return ",".join(f"{path}={value}" for path, value in self.changes.items())[:60]


BAD_FIELDS = (
    BadField(
        RUN, {"spec.rollouts.groupsize": 4}, "spec.rollouts.groupsize", "groupsize", "poolRef, groupSize", "groupSize?"
    ),
    BadField(
        RUN,
        {"spec.rollouts.group_size": 4},
        "spec.rollouts.group_size",
        "group_size",
        "poolRef",
        "did you mean groupSize?",
    ),
    BadField(RUN, {"spec.zzz": 1}, "spec.zzz", "zzz", "policies, tasks", "remove it"),
    BadField(RUN, {"spec.steps": ABSENT}, "spec.steps", "", "integer from 1 to 1000000", "add steps: Steps of the run"),
    BadField(RUN, {"spec.steps": None}, "spec.steps", "", "integer from 1 to 1000000", "add steps: Steps of the run"),
    BadField(RUN, {"spec.steps": "12"}, "spec.steps", '"12"', "integer from 1 to 1000000", "without quotes"),
    BadField(RUN, {"spec.steps": 1.5}, "spec.steps", "1.5", "integer from 1 to 1000000", "whole number"),
    BadField(RUN, {"spec.steps": True}, "spec.steps", "true", "integer from 1 to 1000000", "correct it"),
    BadField(RUN, {"spec.steps": 0}, "spec.steps", "0", "integer from 1 to 1000000", "within the bounds"),
    BadField(
        RUN, {"spec.rollouts.groupSize": 257}, "spec.rollouts.groupSize", "257", "integer from 1 to 256", "within"
    ),
    BadField(RUN, {"spec.policies": []}, "spec.policies", "a list of 0 items", "list of 1 to 8 items", "within"),
    BadField(
        RUN, {"spec.policies": {"a": 1}}, "spec.policies", "an object with a", "list of 1 to 8 items", "write a list"
    ),
    BadField(
        RUN, {"spec.policies.0.model": "x"}, "spec.policies[0].model", '"x"', "object with path, pvc", "write an object"
    ),
    BadField(
        RUN,
        {"spec.policies.0.name": "My Policy"},
        "spec.policies[0].name",
        '"My Policy"',
        "text of 1 to 20",
        "lower-case",
    ),
    BadField(
        RUN,
        {"spec.algorithm.advantage": "GRPO"},
        "spec.algorithm.advantage",
        '"GRPO"',
        "one of grpo, rloo",
        "mean grpo?",
    ),
    BadField(
        RUN,
        {"spec.algorithm.loss.clipLow": float("nan")},
        "spec.algorithm.loss.clipLow",
        "nan",
        "number at least 0",
        "within",
    ),
    BadField(
        RUN,
        {"spec.algorithm.optimizer.learningRate": 0},
        "spec.algorithm.optimizer.learningRate",
        "0",
        "number greater than 0, at most 1",
        "within",
    ),
    BadField(
        RUN,
        {"spec.algorithm.optimizer.betas": [0.9]},
        "spec.algorithm.optimizer.betas",
        "a list of 1 item",
        "list of 2 items",
        "within",
    ),
    BadField(
        RUN,
        {"spec.algorithm.optimizer.betas": [0.9, 1]},
        "spec.algorithm.optimizer.betas[1]",
        "1",
        "number at least 0, less than 1",
        "within",
    ),
    BadField(
        RUN,
        {"spec.trainer.overrides": {"a.b": [1]}},
        'spec.trainer.overrides["a.b"]',
        "a list of 1 item",
        "single value",
        "correct",
    ),
    BadField(
        RUN,
        {"spec.trainer.loggers": ["stdout"]},
        "spec.trainer.loggers[0]",
        '"stdout"',
        "one of console, tensorboard",
        "choose",
    ),
    BadField(RUN, {"spec.suspend": "no"}, "spec.suspend", '"no"', "true or false", "without quotes"),
    BadField(
        RUN, {"spec.storage": {"bucket": "a"}}, "spec.storage.bucket", '"a"', "text of 3 to 63 characters", "within"
    ),
    BadField(
        RUN,
        {"spec.policies.1.endpoint.url": "models"},
        "spec.policies[1].endpoint.url",
        '"models"',
        "text that is not empty",
        "within",
    ),
    BadField(
        RUN,
        {"spec.policies.1.endpoint.url": "models.test/v1"},
        "spec.policies[1].endpoint.url",
        '"models.test/v1"',
        "matching ^https",
        "Base URL",
    ),
    BadField(RUN, {"metadata.name": "Run"}, "metadata.name", '"Run"', "text of 1 to 40 characters", "lower-case"),
    BadField(RUN, {"metadata": ABSENT}, "metadata", "", "object with name", "add metadata"),
    BadField(
        RUN,
        {"apiVersion": "kitestring.dev/v1"},
        "apiVersion",
        '"kitestring.dev/v1"',
        "kitestring.dev/v1alpha1",
        "mean kitestring.dev/v1alpha1?",
    ),
    BadField(RUN, {"kind": "Trainingrun"}, "kind", "Trainingrun", "TrainingRun, RolloutPool", "upper and lower case"),
    BadField(RUN, {"kind": ABSENT}, "kind", "", "TrainingRun, RolloutPool", "say what"),
    BadField(POOL, {"spec.template": ABSENT}, "spec.template", "", "object with metadata and spec", "add template"),
    BadField(
        POOL,
        {"spec.template.spec.containers": []},
        "spec.template.spec.containers",
        "a list of 0 items",
        "list of 1 to 16",
        "within",
    ),
    BadField(
        POOL,
        {"spec.template.spec.containers.0.command": "python agent.py"},
        "spec.template.spec.containers[0].command",
        '"python agent.py"',
        "list of at most 64 items",
        "write a list",
    ),
    BadField(
        POOL,
        {"spec.template.spec.containers.0.env": [{"name": "A", "value": 1}]},
        "spec.template.spec.containers[0].env[0].value",
        "1",
        "text",
        "put it in quotes",
    ),
    BadField(
        POOL,
        {"spec.limits.memory": "lots"},
        "spec.limits.memory",
        '"lots"',
        "quantity such as 512Mi",
        "Private writable memory",
    ),
    BadField(
        POOL,
        {"spec.limits.frozenTokens": {"Judge": 1}},
        "spec.limits.frozenTokens.Judge",
        '"Judge"',
        "pattern",
        "rename",
    ),
    BadField(
        POOL,
        {"spec.limits.frozenTokens": {"judge": "9"}},
        "spec.limits.frozenTokens.judge",
        '"9"',
        "integer from 0",
        "without quotes",
    ),
    BadField(
        POOL,
        {"spec.reward": {"source": "builtin", "builtin": {"kind": "exact"}}},
        "spec.reward.builtin.kind",
        '"exact"',
        "one of exactMatch",
        "choose",
    ),
    BadField(POOL, {"spec.agentProtocol.preload": ["agent.py"]}, "", "", "", ""),
    BadField(
        POOL,
        {"spec.agentProtocol.preload": ["a-b"]},
        "spec.agentProtocol.preload[0]",
        '"a-b"',
        "text of 1 to 128",
        "correct",
    ),
)


@pytest.mark.parametrize("case", BAD_FIELDS, ids=str)
def test_a_bad_field(check: Check, case: BadField) -> None:
    problems = check(changed(case.right, case.changes)).problems
    if not case.path:
        assert problems == ()
        return
    assert len(problems) == 1, [str(problem) for problem in problems]
    assert (problems[0].where, problems[0].found) == (case.path, case.found)
    assert case.allowed in problems[0].allowed
    assert case.remedy in problems[0].remedy
    assert problems[0].severity == "error"


def test_every_problem_of_a_document_is_told_at_once(check: Check) -> None:
    problems = check(changed(RUN, {"spec.steps": 0, "spec.zzz": 1, "spec.policies.1.train": "no"})).problems
    assert {problem.where for problem in problems} == {"spec.steps", "spec.zzz", "spec.policies[1].train"}
    lines = [problem.line for problem in problems]
    assert lines == sorted(lines, key=lambda line: line or 0)


def test_a_broken_rule_names_field_value_and_remedy(check: Check) -> None:
    (problem,) = check(
        changed(RUN, {"spec.rollouts": {"poolRef": {"name": "x"}, "groupSize": 4, "minGroupSize": 5}})
    ).problems
    assert problem.where == "spec.rollouts.minGroupSize"
    assert problem.found == "5"
    assert problem.allowed == "spec.rollouts.minGroupSize must not be greater than spec.rollouts.groupSize"
    assert problem.remedy == "lower minGroupSize or raise groupSize"


def test_a_rule_sees_defaults(check: Check) -> None:
    (problem,) = check(changed(RUN, {"spec.trainer": ABSENT})).problems
    assert (problem.where, problem.found) == ("spec.trainer.gpusPerNode", "0")


def test_a_value_that_is_not_supported_yet(check: Check) -> None:
    (problem,) = check(changed(RUN, {"spec.trainer.mode": "managed"})).problems
    assert (problem.where, problem.found, problem.allowed) == ("spec.trainer.mode", '"managed"', "external")
    assert problem.what.startswith("not supported yet: ")


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("kind: TrainingRun\n  spec: {", 2, "no valid YAML: mapping values are not allowed here"),
        ("kind: [a, b\nspec: 1", 2, "no valid YAML: while parsing a flow sequence"),
        ("kind: a\nspec:\n  steps: 1\n  steps: 2\n", 4, "no valid YAML: the key steps comes twice"),
        ("kind: a\n1: b\n", 2, "no valid YAML: the key 1 is no text"),
        ("kind: a\n\tspec: 1\n", 2, "no valid YAML: while scanning for the next token"),
        ("a: &x {b: *x}\n", 1, "no valid YAML: an alias refers to what it stands in"),
        ("a: *nowhere\n", 1, "no valid YAML: found undefined alias"),
        ("a: !!python/object:os.system x\n", 1, "no valid YAML: could not determine a constructor"),
        ("a: !!int x\n", None, "no valid YAML: invalid literal"),
        ("b: 1\na: \x01\n", 2, "no valid YAML: the character"),
        ("", None, "holds no document"),
        ("# nothing\n---\n---\n", None, "holds no document"),
    ],
)
def test_bad_yaml(check: Check, text: str, line: int | None, what: str) -> None:
    (problem,) = check(text).problems
    assert problem.line == line
    assert problem.what.startswith(what)
    assert str(problem).startswith(f"{problem.file}:{line}: " if line else f"{problem.file}: ")


def test_a_document_that_is_no_object(check: Check) -> None:
    validation = check("- a\n- b", POOL)
    (problem,) = validation.problems
    assert (problem.document, problem.line, problem.found) == (1, 1, "a list of 2 items")
    assert [document.kind for document in validation.documents.documents] == ["RolloutPool"]


def test_documents_and_lines_are_counted_as_an_editor_counts(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    pool = yaml.safe_dump(changed(POOL, {"spec.replicas": -1}), sort_keys=False)
    path.write_text(f"# a comment\n---\n{yaml.safe_dump(RUN)}---\n---\n{pool}")
    (problem,) = validate([str(path)]).problems
    # the empty document in the middle is counted, a comment is none
    assert problem.document == 3
    assert path.read_text().splitlines()[(problem.line or 0) - 1] == "  replicas: -1"


def test_numbers_are_read_as_kubectl_reads_them(check: Check) -> None:
    text = yaml.safe_dump(changed(RUN, {"spec.algorithm.optimizer.learningRate": 0.5})).replace(
        "learningRate: 0.5", "learningRate: 1e-3"
    )
    validation = check(text)
    assert validation.problems == ()
    assert validation.documents.runs[0].spec.algorithm.optimizer.learning_rate == 1e-3


def _binary(folder: Path) -> Path:
    path = folder / "image.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    return path


@pytest.mark.parametrize(
    "make", [lambda p: p / "nowhere.yaml", lambda p: p, _binary], ids=["missing", "folder", "binary"]
)
def test_a_file_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (problem,) = validate([str(make(tmp_path))]).problems
    assert problem.document is None
    assert problem.remedy == "give the path of a YAML file"


# --- documents taken together -----------------------------------------------------------------------------------------


def test_the_pool_of_a_run_must_be_in_the_files_when_there_are_pools(check: Check) -> None:
    other = changed(POOL, {"metadata.name": "other"})
    (problem,) = check(RUN, other).problems
    assert (problem.where, problem.found, problem.allowed) == ("spec.rollouts.poolRef.name", "calculator", "other")
    assert check(RUN).ok


def test_a_pool_with_mistakes_is_not_said_to_be_missing(check: Check) -> None:
    problems = check(RUN, changed(POOL, {"spec.replicas": -1})).problems
    assert [problem.where for problem in problems] == ["spec.replicas"]


def test_the_same_name_twice(check: Check) -> None:
    (problem,) = check(RUN, POOL, RUN).problems
    assert (problem.document, problem.where, problem.found) == (3, "metadata.name", "calculator")


@pytest.mark.parametrize(
    ("run", "pool", "where", "requires"),
    [
        (
            {},
            {"spec.agentProtocol.task.field": "answer"},
            "RolloutPool:spec.agentProtocol.task.field",
            "must be a visible field of the tasks of run calculator",
        ),
        (
            {"spec.tasks.visibleFields": ["other"]},
            {},
            "RolloutPool:spec.agentProtocol.task.field",
            "must be a visible field of the tasks of run calculator",
        ),
        (
            {},
            {"spec.limits.frozenTokens": {"judge": 5, "policy": 5}},
            "RolloutPool:spec.limits.frozenTokens.policy",
            "must name a frozen policy of the run calculator: judge",
        ),
        (
            {"spec.tasks.train": {"inline": [{"question": "1+1", "answer": "2"}, {"question": "1+2"}]}},
            {},
            "TrainingRun:spec.tasks.train.inline[1]",
            "must have the field answer, which the pool calculator names",
        ),
        (
            {},
            {"spec.reward.builtin": {"kind": "regex", "pattern": "(a"}},
            "RolloutPool:spec.reward.builtin.pattern",
            "must be a regular expression of Python",
        ),
        (
            {},
            {"spec.network.egress": [{"cidr": "10.0.0.1/8"}]},
            "RolloutPool:spec.network.egress[0].cidr",
            "must be a range of addresses: 10.0.0.1/8 has host bits set",
        ),
        (
            {},
            {"spec.network.egress": [{"cidr": "10.0.0.0/8", "except": ["10.0.0.0/33"]}]},
            "RolloutPool:spec.network.egress[0].except[0]",
            "must be a range of addresses",
        ),
        (
            {},
            {"spec.network.egress": [{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "fd00::/8"]}]},
            "RolloutPool:spec.network.egress[0].except[1]",
            "must lie within cidr 10.0.0.0/8",
        ),
        (
            {},
            {
                "spec.reward": {
                    "source": "scorer",
                    "scorer": {"image": "judge:1", "network": {"egress": [{"cidr": "10.0.0.1/8"}]}},
                }
            },
            "RolloutPool:spec.reward.scorer.network.egress[0].cidr",
            "must be a range of addresses: 10.0.0.1/8 has host bits set",
        ),
        (
            {"spec.tasks.train.path": "train.csv"},
            {},
            "TrainingRun:spec.tasks.train.path",
            "must end in .jsonl or .parquet",
        ),
        (
            {"spec.trainer": {"backend": "collect", "overrides": {"a.b": 1}}},
            {},
            "TrainingRun:spec.trainer.overrides",
            "has no meaning with backend: collect",
        ),
    ],
)
def test_what_run_and_pool_must_agree_about(
    check: Check, run: dict[str, Any], pool: dict[str, Any], where: str, requires: str
) -> None:
    (problem,) = check(changed(RUN, run), changed(POOL, pool)).problems
    assert (f"{problem.kind}:{problem.where}", problem.severity) == (where, "error")
    assert problem.allowed.startswith(requires)


def test_an_answer_that_the_agent_can_read_is_noted(check: Check) -> None:
    validation = check(changed(RUN, {"spec.tasks.hiddenFields": []}), POOL)
    (problem,) = validation.problems
    assert (problem.severity, problem.where) == ("note", "spec.tasks.hiddenFields")
    assert validation.ok


def test_keys_of_config_maps_and_secrets_of_the_files(check: Check) -> None:
    run = changed(
        RUN,
        {
            "spec.tasks.train": {"configMap": {"name": "tasks", "key": "train.jsonl"}},
            "spec.policies.1.endpoint.apiKeySecretRef": {"name": "judge", "key": "token"},
        },
    )
    tasks = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tasks"}, "data": {"a.jsonl": "{}"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "judge"}, "data": {"token": "c2VjcmV0"}}
    validation = check(run, tasks, secret)
    (problem,) = validation.problems
    assert (problem.where, problem.found, problem.allowed) == (
        "spec.tasks.train.configMap.key",
        "train.jsonl",
        "a.jsonl",
    )
    found = validation.documents.secret("judge")
    assert found is not None
    assert found.values == {"token": b"secret"}
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("kind", "fields", "path"),
    [
        ("Secret", {"data": {"token": "not base64!"}}, "data.token"),
        ("Secret", {"stringData": {"token": 12345}}, "stringData.token"),
        ("ConfigMap", {"data": {"count": 3}}, "data.count"),
        ("ConfigMap", {"data": ["a"]}, "data"),
        ("ConfigMap", {"metadata": {}}, "metadata.name"),
    ],
)
def test_bad_config_maps_and_secrets_are_told_without_their_values(
    check: Check, kind: str, fields: dict[str, Any], path: str
) -> None:
    document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "x"}, **fields}
    (problem,) = check(document).problems
    assert problem.where == path
    assert "12345" not in str(problem)
    assert "not base64!" not in str(problem)


def test_other_kinds_are_noted_and_ignored(check: Check) -> None:
    validation = check(RUN, POOL, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}})
    (problem,) = validation.problems
    assert (problem.severity, problem.found) == ("note", "Service")
    assert validation.ok


# --- what a reader and a program get ---------------------------------------------------------------------------------


def test_text_is_one_line_per_problem(check: Check) -> None:
    validation = check(changed(RUN, {"spec.steps": 0}), POOL)
    file = validation.problems[0].file
    line = validation.problems[0].line
    assert validation.as_text().splitlines() == [
        f"{file}:{line}: TrainingRun/calculator (document 1): spec.steps: out of bounds; found 0; "
        "allowed: integer from 1 to 1000000; remedy: choose a value within the bounds",
        "1 problem found",
    ]


def test_json_is_one_object(check: Check) -> None:
    found = json.loads(check(changed(RUN, {"spec.steps": 0}), POOL).as_json())
    assert found["valid"] is False
    assert [document["kind"] for document in found["documents"]] == ["TrainingRun", "RolloutPool"]
    (problem,) = found["problems"]
    assert problem | {"file": "", "line": 0} == {
        "severity": "error",
        "file": "",
        "document": 1,
        "kind": "TrainingRun",
        "name": "calculator",
        "line": 0,
        "path": "spec.steps",
        "problem": "out of bounds",
        "found": "0",
        "allowed": "integer from 1 to 1000000",
        "remedy": "choose a value within the bounds",
    }
