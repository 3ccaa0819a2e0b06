"""Every cross-field rule accepts and refuses, by the CEL text that the cluster evaluates."""

from typing import Any

import pytest

from kitestring_api.v1alpha1 import RolloutPool, TrainingRun, TrainingRunSpec
from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.rule import Rule
from kitestring_cli.cel_rules import RuleError, broken_rules
from kitestring_cli.problem import path_text
from tests.api.documents import POOL, RUN
from tests.api.rule_cases import RULE_CASES, RuleCase


def typed(document: dict[str, Any]) -> TrainingRun | RolloutPool:
    model = TrainingRun if document["kind"] == "TrainingRun" else RolloutPool
    return model.from_manifest(document)


def all_rules() -> list[Rule]:
    """Every rule of every model of the API."""
    return [rule for model in _subclasses(ApiModel) for rule in vars(model).get("rules", ())]


def test_right_documents_break_no_rule() -> None:
    for document in (RUN, POOL):
        assert broken_rules(typed(document), typed(document)) == ()


@pytest.mark.parametrize("case", RULE_CASES, ids=str)
def test_a_rule_refuses_and_the_mended_document_passes(case: RuleCase) -> None:
    old = typed(case.old_document) if case.old_document else None
    broken = broken_rules(typed(case.broken_document), old)
    assert [(b.rule.requires[: len(case.rule)], path_text(b.field_path)) for b in broken] == [(case.rule, case.path)]
    # a mend may concern the document as it was: rules about changes look at the old status
    old = typed({**(case.old_document or {}), "status": case.mend["status"]}) if "status" in case.mend else old
    assert broken_rules(typed(case.mended_document), old) == ()


def test_every_rule_has_a_case() -> None:
    rules = all_rules()
    missing = [rule.requires for rule in rules if not any(rule.requires.startswith(case.rule) for case in RULE_CASES)]
    assert missing == []
    assert len(rules) == len(RULE_CASES)


def test_rules_about_changes_are_asked_about_changes_only() -> None:
    cases = [case for case in RULE_CASES if case.is_change]
    assert cases
    for case in cases:
        assert broken_rules(typed(case.broken_document)) == ()


def test_a_run_may_change_before_it_has_started() -> None:
    for case in RULE_CASES:
        if case.kind == "TrainingRun" and case.is_change and "managedBy" not in case.path:
            old = typed({key: value for key, value in case.old_document.items() if key != "status"})  # type: ignore[union-attr]
            assert broken_rules(typed(case.broken_document), old) == ()


def test_messages_name_the_field_and_the_remedy() -> None:
    for rule in all_rules():
        assert rule.requires.startswith("spec"), rule
        assert rule.remedy and not rule.message.endswith("."), rule
        # a cluster cuts messages at 2048 characters
        assert len(rule.message) < 400, rule


def test_rules_about_changes_are_attached_where_both_sides_are_known() -> None:
    """Below a list a cluster pairs old and new items by key; offline nothing does, so no such rule may be there."""
    holders = {model for model in _subclasses(ApiModel) if any(rule.is_transition for rule in model.rules)}
    assert holders == {TrainingRun, TrainingRunSpec, RolloutPool}


def _subclasses(model: type[ApiModel]) -> list[type[ApiModel]]:
    return [model, *(inner for sub in model.__subclasses__() for inner in _subclasses(sub))]


def test_a_rule_that_cannot_be_evaluated_is_a_bug_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingRun, "rules", (Rule("self.nowhere == 1", "spec", "none"),))
    with pytest.raises(RuleError, match="nowhere"):
        broken_rules(typed(RUN))
