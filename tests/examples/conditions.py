"""When Argo and kubectl take a run for finished: the very conditions of examples/, evaluated on an object.

Argo reads `successCondition` and `failureCondition` as label selectors (k8s.io/apimachinery/pkg/labels) whose keys are
JSON paths; every requirement of the first must hold, any of the second suffices, and the second is looked at first
(argo-workflows, workflow/executor/resource.go). The end-to-end tests evaluate them on live objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["succeeded", "failed", "waiting"]

_KEY = r"(?:[a-z0-9.-]+/)?[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s+\(([^()]*)\)")
_COMPARISON = re.compile(rf"({_KEY})\s*(==|!=|=|>|<)\s*({_VALUE})")
_EXISTENCE = re.compile(rf"(!?)\s*({_KEY})")


@dataclass(frozen=True)
class Requirement:
    """One requirement of a label selector."""

    key: str
    operator: str
    """One of: in, notin, >, <, exists, !exists."""
    values: tuple[str, ...] = ()

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """As `labels.Requirement.Matches` over gjson: a missing field satisfies `notin` and `!exists` alone."""
        found = _at(fields, self.key)
        match self.operator:
            case "exists":
                return found is not None
            case "!exists":
                return found is None
            case "in":
                return found is not None and found in self.values
            case "notin":
                return found is None or found not in self.values
        if found is None or not re.fullmatch(r"-?\d+", found):
            return False
        return int(found) > int(self.values[0]) if self.operator == ">" else int(found) < int(self.values[0])


def parse_selector(text: str) -> list[Requirement]:
    """The requirements of a label selector. Raises ValueError for what Kubernetes refuses."""
    return [_requirement(part.strip()) for part in re.split(r",(?![^(]*\))", text)]


def _requirement(text: str) -> Requirement:
    if found := _SET.fullmatch(text):
        values = tuple(value.strip() for value in found[3].split(","))
        if all(re.fullmatch(_VALUE, value) for value in values):
            return Requirement(found[1], found[2], values)
    elif found := _COMPARISON.fullmatch(text):
        key, operator, value = found.groups()
        if operator in "<>":
            if re.fullmatch(r"\d+", value):
                return Requirement(key, operator, (value,))
        else:
            return Requirement(key, "notin" if operator == "!=" else "in", (value,))
    elif found := _EXISTENCE.fullmatch(text):
        return Requirement(found[2], "!exists" if found[1] else "exists")
    raise ValueError(f"{text!r} is no requirement of a label selector")


def _at(fields: Any, path: str) -> str | None:
    """The value at a dotted path as gjson prints it; None: not there."""
    for name in path.split("."):
        if isinstance(fields, Mapping) and name in fields:
            fields = fields[name]
        elif isinstance(fields, list) and name.isdigit() and int(name) < len(fields):
            fields = fields[int(name)]
        else:
            return None
    if fields is None:
        return ""
    return fields if isinstance(fields, str) else json.dumps(fields, separators=(",", ":"))


def argo_verdict(resource: Mapping[str, Any], item: Mapping[str, Any]) -> Verdict:
    """What Argo makes of an object, by the `resource` of a template with both conditions."""
    if any(requirement.holds(item) for requirement in parse_selector(resource["failureCondition"])):
        return "failed"
    if all(requirement.holds(item) for requirement in parse_selector(resource["successCondition"])):
        return "succeeded"
    return "waiting"


def wait_is_over(condition: str, item: Mapping[str, Any]) -> bool:
    """Whether `kubectl wait --for=condition=CONDITION` returns for an object; CONDITION is `Type` or `Type=Status`.

    A condition about an older generation than the object's does not count, as in kubectl.
    """
    kind, _, wanted = condition.partition("=")
    for found in item.get("status", {}).get("conditions", []):
        if found["type"].lower() == kind.lower():
            seen = found.get("observedGeneration", 0)
            if seen and seen < item["metadata"].get("generation", 0):
                return False
            return bool(found["status"].lower() == (wanted or "true").lower())
    return False
