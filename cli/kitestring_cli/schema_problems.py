"""What pydantic says about a document, said to a user: path, found, allowed, remedy."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kitestring_api.structural_schema import Schema, structural_schema
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_api.wording import allowed
from kitestring_cli.problem import FieldPath, Problem, value_text

_BOUNDS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "finite_number",
        "too_short",
        "too_long",
        "string_too_short",
        "string_too_long",
    }
)


def schema_problems(
    problem: Callable[..., Problem], model: type[TrainingRun] | type[RolloutPool], error: ValidationError
) -> list[Problem]:
    """The problems in `error`, one for each place, in the order of the document.

    `problem(path, what, found=…, allowed=…, remedy=…)` makes a problem in the document that was validated.
    """
    schema = _schema(model)
    problems: dict[FieldPath, Problem] = {}
    for details in error.errors(include_url=False):
        path, node, owner = _locate(schema, details["loc"])
        if path not in problems:
            problems[path] = _problem(problem, path, node, owner, details)
    return list(problems.values())


@cache
def _schema(model: type[TrainingRun] | type[RolloutPool]) -> Schema:
    return structural_schema(model)


def _locate(schema: Schema, location: Sequence[str | int]) -> tuple[FieldPath, Schema, Schema]:
    """Path, schema of what is there, schema of what is around it.

    pydantic's location goes on below a value of several types (with the name of each type) and into keys; the path ends
    where the document does.
    """
    path: list[str | int] = []
    node: Schema = schema
    owner: Schema = schema
    for step in location:
        if isinstance(step, int) and "items" in node:
            owner, node = node, node["items"]
        elif step in node.get("properties", {}):
            owner, node = node, node["properties"][step]
        elif isinstance(step, str) and step != "[key]" and "additionalProperties" in node:
            owner, node = node, node["additionalProperties"]
        elif isinstance(step, str) and "properties" in node:
            return (*path, step), {}, node
        else:
            break
        path.append(step)
    return tuple(path), node, owner


def _problem(
    problem: Callable[..., Problem], path: FieldPath, node: Schema, owner: Schema, details: ErrorDetails
) -> Problem:
    kind, found = details["type"], details["input"]
    if kind == "extra_forbidden":
        return problem(
            path,
            "unknown field",
            found=str(path[-1]),
            allowed=", ".join(owner["properties"]),
            remedy=_nearest(str(path[-1]), list(owner["properties"])),
        )
    if kind == "missing":
        remedy = f"add {path[-1]}" + (f": {node['description']}" if node.get("description") else "")
        return problem(path, "missing", allowed=allowed(node), remedy=remedy.rstrip("."))
    if details["loc"][-1:] == ("[key]",):
        return problem(
            path, "wrong name of an entry", found=value_text(found), allowed=details["msg"], remedy="rename it"
        )
    if kind in _BOUNDS:
        what, remedy = "out of bounds", "choose a value within the bounds"
    elif kind in ("literal_error", "enum"):
        what = "unknown value"
        remedy = _nearest(str(found), [str(value) for value in node.get("enum", [])], otherwise="choose one of them")
    elif kind == "string_pattern_mismatch":
        what, remedy = "wrong form", _remedy_of_form(node)
    else:
        what, remedy = "wrong type", _remedy_of_type(node, found)
    return problem(path, what, found=value_text(found), allowed=allowed(node), remedy=remedy)


def _nearest(word: str, known: list[str], otherwise: str = "remove it") -> str:
    """Advice: the known word that was probably meant, also when only case or underscores differ."""
    plain = {name.casefold(): name for name in known}
    if near := get_close_matches(word.casefold().replace("_", ""), plain, n=1, cutoff=0.7):
        return f"did you mean {plain[near[0]]}?"
    return otherwise


def _remedy_of_form(node: Schema) -> str:
    if node.get("pattern", "").startswith("^[a-z]"):
        return "use lower-case letters, digits and -, beginning with a letter"
    return f"the field is: {node['description']}".rstrip(".") if node.get("description") else "correct it"


def _remedy_of_type(node: Schema, found: Any) -> str:
    """Advice for the usual mistakes: quotes too many or missing, an item in the place of a list."""
    wanted = node.get("type")
    if isinstance(found, str) and wanted in ("integer", "number", "boolean"):
        return "write it without quotes and units" if wanted != "boolean" else "write true or false without quotes"
    if isinstance(found, bool | int | float) and wanted == "string":
        return "put it in quotes"
    if isinstance(found, float) and wanted == "integer":
        return "write a whole number"
    if wanted == "array":
        return "write a list: [a, b], or one item per line with -"
    if wanted == "object":
        return "write an object: name: value, indented below"
    return "correct it"
