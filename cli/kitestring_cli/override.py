"""`--set spec.steps=3`: one field of a document, set on the command line.

`[KIND[/NAME]:]PATH=VALUE`. Without a kind the TrainingRun is meant; `RolloutPool:spec.replicas=2` is the pool, and
`RolloutPool/calculator:spec.replicas=2` the pool of that name, where there are several. PATH is dotted; items of a list
are named by position or by their `name`, keys with dots in brackets and quotes: `spec.policies[0].model.path=./m`,
`spec.policies[judge].endpoint.model=x`, `spec.trainer.overrides["actor.strategy"]=fsdp`. VALUE is typed as YAML types
it; `null` removes the field.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kitestring_cli.problem import FieldPath
from kitestring_cli.yaml_text import YamlError, parse_scalar

_ARGUMENT = re.compile(r"(?:(?P<kind>[A-Z][A-Za-z]*)(?:/(?P<name>[^:=]+))?:)?(?P<path>[^=]*?)=(?P<value>.*)", re.DOTALL)
_STEP = re.compile(
    r"""\.?(?P<name>[A-Za-z0-9_-]+)|\[(?P<index>\d+)\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]|\[(?P<bare>[^\]"]+)\]"""
)
_FORM = "write it as spec.steps=3 or RolloutPool/NAME:spec.replicas=2"
_DEFAULT_KIND = "TrainingRun"


class OverrideError(Exception):
    """A `--set` that cannot be understood or applied, with what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Override:
    """A parsed `--set`: in the document of `kind` (and `name`, where given) set `path` to `value`."""

    argument: str
    kind: str
    name: str | None
    path: FieldPath
    value: Any


def parse_override(argument: str) -> Override:
    """The override that `argument` says. Raises OverrideError."""
    match = _ARGUMENT.fullmatch(argument)
    if match is None:
        raise OverrideError("is no assignment", _FORM)
    path = _parse_path(match["path"])
    try:
        value = parse_scalar(match["value"])
    except YamlError as error:
        raise OverrideError(f"the value is no YAML: {error}", "put it in quotes") from error
    return Override(argument, match["kind"] or _DEFAULT_KIND, match["name"], path, value)


def apply(override: Override, documents: Sequence[dict[str, Any]]) -> None:
    """Set the field in the one document that is meant, in place. Raises OverrideError."""
    of_kind = [document for document in documents if document.get("kind") == override.kind]
    chosen = [document for document in of_kind if override.name in (None, _name(document))]
    if not chosen:
        known = ", ".join(_name(document) for document in of_kind)
        what = f"no {override.kind}" + (f" named {override.name}" if override.name else "") + " in the files"
        raise OverrideError(what, f"known: {known}" if known else "add one, or correct the kind")
    if len(chosen) > 1:
        known = ", ".join(f"{override.kind}/{_name(document)}:" for document in chosen)
        raise OverrideError(f"the files have several documents of kind {override.kind}", f"begin with one of {known}")
    place: Any = chosen[0]
    for depth, (step, following) in enumerate(zip(override.path, (*override.path[1:], None), strict=True), start=1):
        resolved = _resolve(place, step, override.path[:depth])
        if following is None:
            _assign(place, resolved, override.value)
        elif isinstance(place, dict) and place.get(resolved) is None:
            if isinstance(following, int):
                raise OverrideError(f"{_text(override.path[:depth])} is not in the file", "set the whole list: […]")
            place[resolved] = {}
            place = place[resolved]
        else:
            place = place[resolved]


def _assign(place: Any, step: str | int, value: Any) -> None:
    if value is None and isinstance(place, dict):
        place.pop(step, None)
    else:
        place[step] = value


def _resolve(place: Any, step: str | int, path: FieldPath) -> str | int:
    """`step` as key or index of `place`."""
    if isinstance(place, dict):
        return str(step)
    if not isinstance(place, list):
        raise OverrideError(f"{_text(path[:-1])} is a single value and has no {step}", "set the field itself")
    if isinstance(step, int):
        if step >= len(place):
            raise OverrideError(f"{_text(path[:-1])} has {len(place)} items, no [{step}]", "items count from 0")
        return step
    for index, item in enumerate(place):
        if isinstance(item, dict) and item.get("name") == step:
            return index
    known = ", ".join(str(item.get("name")) for item in place if isinstance(item, dict) and "name" in item)
    raise OverrideError(f"{_text(path[:-1])} has no item named {step}", f"known: {known}" if known else "use [0]")


def _parse_path(text: str) -> FieldPath:
    steps: list[str | int] = []
    position = 0
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None or (position == 0 and text.startswith((".", "["))):
            raise OverrideError(f"the path {text} makes no sense from {text[position:]} on", _FORM)
        if match["index"] is not None:
            steps.append(int(match["index"]))
        elif match["quoted"] is not None:
            steps.append(json.loads(match["quoted"]))
        else:
            steps.append(match["name"] or match["bare"])
        position = match.end()
    if not steps:
        raise OverrideError("names no field", _FORM)
    return tuple(steps)


def _name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


def _text(path: FieldPath) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
