"""The constants: documented, and no two of a kind alike."""

import ast
import inspect
import re

from kitestring_api import names

VALUES = {name: value for name, value in vars(names).items() if name.isupper()}


def test_every_constant_says_what_it_is_for() -> None:
    body = ast.parse(inspect.getsource(names)).body
    undocumented = [
        ast.unparse(node.target)
        for node, following in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign)
        and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
    ]
    assert undocumented == []


def test_no_two_of_a_kind_are_alike() -> None:
    for kind in (
        "ENV_",
        "LABEL_",
        "ANNOTATION_",
        "REASON_",
        "ROUTE_",
        "HEADER_",
        "PREFIX_",
        "CLASS_",
        "EXIT_",
        "MODE_",
    ):
        found = [value for name, value in VALUES.items() if name.startswith(kind)]
        assert found
        assert len(set(found)) == len(found), kind


def test_forms() -> None:
    for name, value in VALUES.items():
        if name.startswith("REASON_"):
            assert re.fullmatch("[A-Z][A-Za-z]*", value), name
        if name.startswith(("LABEL_", "ANNOTATION_")) and not name.endswith("_VALUE"):
            assert re.fullmatch(r"[a-z0-9.-]+/[a-z0-9-]+", value), name
        if name.startswith("PREFIX_"):
            assert re.fullmatch("[a-z]+/", value), name


def test_what_an_agent_must_not_set_is_what_it_finds() -> None:
    """Every variable that an agent finds is reserved, except those that it may well set itself."""
    reserved = set(names.AGENT_ENV_RESERVED)
    found = {
        value
        for name, value in VALUES.items()
        if name.startswith("ENV_") and not value.startswith((names.AGENT_ENV_PREFIX, "AWS_"))
    }
    assert found - reserved == {names.ENV_OPENAI_MODEL, names.ENV_OTEL_RESOURCE, names.ENV_OTEL_SERVICE}
