"""What this version cannot carry out is refused, each entry of the table by itself."""

from typing import Any

import pytest

from kitestring_api.structural_schema import structural_schema
from kitestring_api.unsupported import NOT_YET, refusals
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from tests.api.documents import ABSENT, POOL, RUN, changed

PLACE = {"bucket": "data", "key": "a"}

# changes of the right document -> path of the offending field, value
CASES: tuple[tuple[dict[str, Any], str, Any], ...] = (
    ({"spec.policies.1": {"name": "b", "model": {"path": "b"}}}, "spec.policies", None),
    (
        {"spec.policies.1.endpoint": ABSENT, "spec.policies.1.model": {"path": "j"}},
        "spec.policies[1].model",
        {"path": "j"},
    ),
    ({"spec.rollouts.async.maxStaleness": 1}, "spec.rollouts.async.maxStaleness", 1),
    ({"spec.rollouts.refill": True}, "spec.rollouts.refill", True),
    ({"spec.algorithm.advantage": "gae"}, "spec.algorithm.advantage", "gae"),
    ({"spec.algorithm.advantage": "gae"}, "spec.algorithm.advantage", "gae"),
    ({"spec.algorithm.loss.kind": "gspo"}, "spec.algorithm.loss.kind", "gspo"),
    ({"spec.algorithm.credit.kind": "discounted"}, "spec.algorithm.credit.kind", "discounted"),
    (
        {"spec.algorithm.intermediateRewards": {"source": "agent"}},
        "spec.algorithm.intermediateRewards",
        {"source": "agent", "weight": 1.0},
    ),
    ({"spec.trainer.mode": "managed"}, "spec.trainer.mode", "managed"),
    ({"spec.policies.0.model": {"s3": PLACE}}, "spec.policies[0].model.s3", PLACE),
    ({"spec.tasks.train": {"s3": PLACE}}, "spec.tasks.train.s3", PLACE),
    ({"spec.tasks.validation": {"s3": PLACE}}, "spec.tasks.validation.s3", PLACE),
    ({"spec.storage": {"bucket": "runs", "credentials": {"traces": {"name": "t"}}}}, "spec.storage", None),
)


@pytest.mark.parametrize(("changes", "path", "value"), CASES, ids=[path for _, path, _ in CASES])
def test_a_value_is_refused(changes: dict[str, Any], path: str, value: Any) -> None:
    (refusal,) = refusals(TrainingRun.from_manifest(changed(RUN, changes)))
    assert refusal.path == path
    assert value is None or refusal.value == value
    assert "is not supported yet" in refusal.message
    assert refusal.message.endswith(refusal.entry.remedy)


def test_every_entry_has_a_case() -> None:
    tested = {path.replace("[0]", "[*]").replace("[1]", "[*]") for _, path, _ in CASES}
    assert {entry.where for entry in NOT_YET} == tested


def test_right_documents_are_not_refused() -> None:
    assert refusals(TrainingRun.from_manifest(RUN)) == ()
    assert refusals(RolloutPool.from_manifest(POOL)) == ()


@pytest.mark.parametrize("entry", NOT_YET, ids=lambda entry: entry.where)
def test_entries_name_fields_and_values_of_the_schema(entry: Any) -> None:
    node = structural_schema(TrainingRun if entry.kind == "TrainingRun" else RolloutPool)
    for step in entry.where.split("."):
        node = node["properties"][step.removesuffix("[*]")]
        if step.endswith("[*]"):
            node = node["items"]
    if "enum" in node:
        refused = [value for value in node["enum"] if entry.refuses(value)]
        carried_out = [value for value in node["enum"] if not entry.refuses(value)]
        assert sorted(entry.values.split(", ")) == sorted(refused)
        assert sorted(entry.allowed.split(", ")) == sorted(carried_out)
