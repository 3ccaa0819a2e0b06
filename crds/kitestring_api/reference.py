"""The API reference, made from the schemas: every field with type, default, bounds and meaning, in Markdown."""

import json
from collections.abc import Iterator
from typing import Any

from kitestring_api import names
from kitestring_api.crd import definitions
from kitestring_api.structural_schema import Schema
from kitestring_api.unsupported import NOT_YET
from kitestring_api.v1alpha1.status import ConditionType, Phase
from kitestring_api.wording import allowed

_INTRODUCTION = f"""\
<!-- Generated from the models in crds/kitestring_api by `make generate`. Do not edit. -->

# API reference: `{names.API_VERSION}`

Two resources. A **RolloutPool** is an agent: its container, how a task reaches it, who scores it, its limits, and how
many of it run. A **TrainingRun** is what is trained: policies, tasks, algorithm, machines. `kubectl apply` and
`kitestring run` take the same files; `kitestring validate` checks them offline.

- Unknown fields and wrong types are refused. A field that is absent has its default.
- Rules across fields are CEL in the custom resource definitions; the same text is evaluated offline.
- What the API can say and this version cannot carry out is refused, never ignored: see
  [Not supported yet](#not-supported-yet).
"""


def reference() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for definition in definitions().values():
        kind = definition["spec"]["names"]["kind"]
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        short = definition["spec"]["names"]["shortNames"][0]
        parts.append(f"## {kind}\n\n{schema['description']} `kubectl get {short}` lists them.\n")
        parts.append(_fields(schema["properties"]["spec"], "spec"))
        parts.append(_rules(schema, kind))
        parts.append(f"### Status of a {kind}\n\nWritten by the operator.\n")
        parts.append(_fields(schema["properties"]["status"], "status"))
    parts.append(_closed_sets())
    parts.append(_not_yet())
    return "\n".join(parts)


def _fields(schema: Schema, path: str) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field, node, required in _walk(schema, path):
        default = "**required**" if required else _default(node)
        cells = (f"`{field}`", _type(node), default, node.get("description", ""))
        rows.append("| " + " | ".join(_escape(cell) for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _walk(schema: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    """(path, schema, required) of every field below `schema`, outer before inner."""
    required = schema.get("required", [])
    for name, node in schema.get("properties", {}).items():
        field = f"{path}.{name}"
        yield field, node, name in required
        yield from _walk(node, field)
        if node.get("items", {}).get("type") == "object":
            yield from _walk(node["items"], f"{field}[]")


def _type(node: Schema) -> str:
    if node.get("type") == "object" and "properties" in node:
        return "object"
    if node.get("type") == "array" and node["items"].get("type") == "object":
        return allowed(node).partition("; each: ")[0].replace("list of", "list of objects:")
    words, matching, pattern = allowed(node).partition(" matching ")
    return f"{words}{matching}`{pattern}`" if pattern else words


def _default(node: Schema) -> str:
    if "default" not in node:
        return ""
    value: Any = node["default"]
    if isinstance(value, dict) and value:
        return "as below"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _rules(schema: Schema, kind: str) -> str:
    """Two tables: rules about a resource, and rules about a change of one. The same rule of two fields stands once."""
    messages = {rule["message"]: "oldSelf" in rule["rule"] for rule in _all_rules(schema)}
    standing = [message for message, is_transition in messages.items() if not is_transition]
    changes = [message for message, is_transition in messages.items() if is_transition]
    tables = [f"### Rules of a {kind}\n", *_messages(standing), "", f"### Changes of a {kind}\n", *_messages(changes)]
    return "\n".join(tables) + "\n"


def _messages(messages: list[str]) -> list[str]:
    rows = ["| rule | otherwise |", "|---|---|"]
    for message in messages:
        requires, _, remedy = message.partition("; ")
        rows.append(f"| {_escape(requires)} | {_escape(remedy)} |")
    return rows


def _all_rules(node: Schema) -> Iterator[dict[str, str]]:
    yield from node.get("x-kubernetes-validations", [])
    for inner in node.get("properties", {}).values():
        yield from _all_rules(inner)
    if "items" in node:
        yield from _all_rules(node["items"])


def _closed_sets() -> str:
    reasons = [value for name, value in vars(names).items() if name.startswith("REASON_")]
    return f"""\
## Phases, conditions, reasons

Closed sets: scripts may compare with them. The phases `{Phase.SUCCEEDED}` and `{Phase.FAILED}` are final.

- **Phases:** {_code(Phase)}.
- **Conditions:** {_code(ConditionType)}. `{ConditionType.FINISHED}` is true for every ending:
  `kubectl wait --for=condition={ConditionType.FINISHED} trainingrun/NAME`. A run that is not
  `{ConditionType.ACCEPTED}` before its start waits to be corrected and has not ended: a pipeline waits a minute for
  `{ConditionType.ACCEPTED}` first.
- **Reasons:** {_code(reasons)}.
- **Classes of rollouts:** {_code(names.CLASSES)}.
"""


def _not_yet() -> str:
    rows = ["| kind | field | refused | carried out | why | instead |", "|---|---|---|---|---|---|"]
    for entry in NOT_YET:
        cells = (
            entry.kind,
            f"`{entry.where.replace('[*]', '[]')}`",
            entry.values,
            entry.allowed,
            entry.reason,
            entry.remedy,
        )
        rows.append("| " + " | ".join(_escape(cell) for cell in cells) + " |")
    head = "## Not supported yet\n\nThe API has room for these; this version refuses them.\n\n"
    return head + "\n".join(rows) + "\n"


def _code(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
