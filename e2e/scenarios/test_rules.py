"""Every cross-field rule of the API once, refused by the cluster itself, with the message that a user reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.harness.api import Api
from e2e.harness.kinds import KINDS
from e2e.harness.kubectl import CommandFailed, Kubectl
from e2e.harness.namespace import Namespace
from e2e.harness.release import Release
from tests.api.rule_cases import RULE_CASES, RuleCase

pytestmark = pytest.mark.core

NEW = [case for case in RULE_CASES if not case.is_change]
CHANGES = [case for case in RULE_CASES if case.is_change]
NOT_OURS = "kitestring.test/nobody"
"""`spec.managedBy` of a run that the operator is to leave alone."""


@pytest.fixture(scope="module")
def space(api: Api, kubectl: Kubectl, release: Release) -> Iterator[Namespace]:
    """One namespace for all: nothing but the documents that are to be changed is ever stored in it."""
    space = Namespace.create(api, "rules", kubectl)
    yield space
    space.remove()


@pytest.mark.parametrize("case", NEW, ids=str)
def test_a_document_that_breaks_a_rule_is_refused(case: RuleCase, space: Namespace) -> None:
    """`kubectl create` says which field and what to do; the mended document is taken."""
    said = refusal(space, "create", case.broken_document)
    assert case.rule in said
    dry_run(space, "create", case.mended_document)


@pytest.mark.parametrize("case", CHANGES, ids=str)
def test_a_change_that_breaks_a_rule_is_refused(case: RuleCase, space: Namespace) -> None:
    """`kubectl replace` says which field and what to do, while the stored document is as the rule wants to see it."""
    assert case.old_document is not None
    kind = KINDS[case.kind]
    old, broken = (left_alone(case, document) for document in (case.old_document, case.broken_document))
    name = old["metadata"]["name"]
    space.delete(kind, name)
    space.until_gone(kind, seconds=60, name=name)
    space.apply({key: value for key, value in old.items() if key != "status"})
    for _ in range(20):
        space.patch(kind, name, {"status": old["status"]}, "status")
        try:
            dry_run(space, "replace", broken)
        except CommandFailed as refused:
            assert case.rule in refused.stderr
            return
        # The operator, which looks after pools, may have put the status right meanwhile: then the change was fine.
        found = space.get(kind, name).get("status", {})
        assert any(found.get(key) != value for key, value in old["status"].items()), "the change was taken"
    pytest.fail("the status did not stay as the rule wants to see it")


def left_alone(case: RuleCase, document: dict[str, Any]) -> dict[str, Any]:
    """The document as one of a run that another controller manages, unless the rule is about just that."""
    changed = copy.deepcopy(document)
    if case.kind == "TrainingRun":
        changed["spec"].setdefault("managedBy", NOT_OURS)
    return changed


def dry_run(space: Namespace, verb: str, document: dict[str, Any]) -> str:
    """What kubectl says to a document that would be taken."""
    return space.kubectl(verb, "--dry-run=server", "--filename", "-", stdin=json.dumps(document))


def refusal(space: Namespace, verb: str, document: dict[str, Any]) -> str:
    """What kubectl says to a document that is refused."""
    with pytest.raises(CommandFailed) as refused:
        dry_run(space, verb, document)
    return refused.value.stderr
