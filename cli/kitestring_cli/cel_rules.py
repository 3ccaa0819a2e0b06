"""The API's cross-field rules evaluated offline: the very text that the cluster evaluates, by Google's CEL library."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cel_expr_python import cel  # type: ignore[import-untyped]  # it has stubs, but no py.typed

from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.rule import Rule
from kitestring_cli.problem import FieldPath


@dataclass(frozen=True)
class BrokenRule:
    """A rule that does not hold for the object at `path`."""

    rule: Rule
    path: FieldPath

    @property
    def field_path(self) -> FieldPath:
        """Path of the field that the rule blames."""
        return (*self.path, *(step for step in self.rule.field.split(".") if step))


def broken_rules(
    document: TrainingRun | RolloutPool, old: TrainingRun | RolloutPool | None = None
) -> tuple[BrokenRule, ...]:
    """The rules that do not hold for `document`, outermost objects first.

    With `old`, the document as it was before a change, rules about changes are evaluated too; without, they are not, as
    a cluster does when an object is created. A rule that cannot be evaluated is a bug of ours and raises RuleError.
    """
    return tuple(_broken(document, document.manifest(), old.manifest() if old else None, ()))


class RuleError(Exception):
    """A rule that does not compile, or whose evaluation fails: a bug in the rule."""


def _broken(model: ApiModel, data: Any, old: Any, path: FieldPath) -> Iterator[BrokenRule]:
    for rule in model.rules:
        if rule.is_transition and old is None:
            continue
        if not _holds(rule, data, old):
            yield BrokenRule(rule, path)
    for name, field in type(model).model_fields.items():
        alias = str(field.alias)
        value = getattr(model, name)
        if isinstance(value, ApiModel):
            yield from _broken(value, data[alias], old.get(alias) if old else None, (*path, alias))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ApiModel):
                    yield from _broken(item, data[alias][index], None, (*path, alias, index))


def _holds(rule: Rule, data: Any, old: Any) -> bool:
    variables = {"self": data} | ({"oldSelf": old} if rule.is_transition else {})
    answer = _compiled(rule.cel).eval(data=variables)
    if answer.type() != cel.Type.BOOL:
        raise RuleError(f"{rule.cel}: {answer.plain_value()}")
    return answer.plain_value() is True


@cache
def _environment() -> cel.Env:
    return cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN})


@cache
def _compiled(text: str) -> cel.Expression:
    return _environment().compile(text)
