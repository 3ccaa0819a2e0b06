"""`--set`: which document, which field, which type."""

import copy
from typing import Any

import pytest

from kitestring_cli.override import OverrideError, apply, parse_override
from tests.api.documents import POOL, RUN, changed


def overridden(*arguments: str, documents: tuple[dict[str, Any], ...] = (RUN, POOL)) -> list[dict[str, Any]]:
    copied = copy.deepcopy(list(documents))
    for argument in arguments:
        apply(parse_override(argument), copied)
    return copied


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("spec.steps=3", "spec.steps", 3),
        ("spec.algorithm.optimizer.learningRate=1e-3", "spec.algorithm.optimizer.learningRate", 0.001),
        ("spec.suspend=true", "spec.suspend", True),
        ("spec.managedBy='3'", "spec.managedBy", "3"),
        ("spec.managedBy=a=b:c", "spec.managedBy", "a=b:c"),
        ("spec.tasks.hiddenFields=[a, b]", "spec.tasks.hiddenFields", ["a", "b"]),
        ("spec.storage={bucket: runs}", "spec.storage", {"bucket": "runs"}),
        ("spec.policies[0].model.path=./m", "spec.policies.0.model.path", "./m"),
        ("spec.policies[judge].endpoint.model=x", "spec.policies.1.endpoint.model", "x"),
        ("spec.policies.judge.train=false", "spec.policies.1.train", False),
        ("TrainingRun:spec.steps=3", "spec.steps", 3),
        ("TrainingRun/calculator:spec.steps=3", "spec.steps", 3),
    ],
)
def test_a_field_of_the_run(argument: str, path: str, value: Any) -> None:
    assert overridden(argument) == [changed(RUN, {path: value}), POOL]


def test_a_key_with_dots() -> None:
    run, _ = overridden('spec.trainer.overrides["actor.strategy"]=fsdp', "spec.trainer.overrides[a.b]=1")
    assert run["spec"]["trainer"]["overrides"] == {"actor.strategy": "fsdp", "a.b": 1}


def test_a_field_of_the_pool() -> None:
    assert overridden("RolloutPool:spec.replicas=2")[1] == changed(POOL, {"spec.replicas": 2})
    assert overridden("RolloutPool/calculator:spec.limits.calls=2")[1] == changed(POOL, {"spec.limits.calls": 2})


def test_null_removes_a_field() -> None:
    run, _ = overridden("spec.tasks.validation=null", "spec.nowhere=null")
    assert "validation" not in run["spec"]["tasks"]
    assert "nowhere" not in run["spec"]


def test_later_ones_win() -> None:
    assert overridden("spec.steps=3", "spec.steps=4")[0]["spec"]["steps"] == 4


@pytest.mark.parametrize(
    ("argument", "message", "remedy"),
    [
        ("spec.steps", "is no assignment", "write it as spec.steps=3"),
        ("=3", "names no field", "write it as spec.steps=3"),
        (".spec=3", "makes no sense from .spec on", "write it as"),
        ("spec.policies[0=3", "makes no sense from [0 on", "write it as"),
        ("spec.steps=[", "the value is no YAML", "put it in quotes"),
        ("spec.policies[7].train=true", "spec.policies has 2 items, no [7]", "count from 0"),
        ("spec.policies[critic].train=true", "spec.policies has no item named critic", "known: policy, judge"),
        ("spec.steps.more=1", "spec.steps is a single value and has no more", "set the field itself"),
        ("spec.extra[0].x=1", "spec.extra is not in the file", "set the whole list"),
        ("RolloutPool/other:spec.replicas=1", "no RolloutPool named other in the files", "known: calculator"),
        ("Job:spec.x=1", "no Job in the files", "add one"),
    ],
)
def test_what_cannot_be_set(argument: str, message: str, remedy: str) -> None:
    with pytest.raises(OverrideError) as caught:
        overridden(argument)
    assert message in str(caught.value)
    assert remedy in caught.value.remedy


def test_several_documents_need_a_name() -> None:
    two = (RUN, changed(RUN, {"metadata.name": "second"}))
    with pytest.raises(OverrideError) as caught:
        overridden("spec.steps=3", documents=two)
    assert "TrainingRun/second:" in caught.value.remedy
    assert overridden("TrainingRun/second:spec.steps=3", documents=two)[1]["spec"]["steps"] == 3
