"""`python charts/generate.py`: what is made from other files, written into the tree.

The chart's copies of the custom resource definitions (Helm reads nothing outside a chart), and in
docs/installation.md the tables of values and of rights. `files()` says what they must hold; a test compares it with
what is checked in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kitestring_cli.generate import write

ROOT = Path(__file__).resolve().parents[1]
CHART = Path("charts/kitestring")
PAGE = Path("docs/installation.md")
MARK = "# --"
"""Begins the comment above a value that belongs into the table."""


class Value(NamedTuple):
    """A value of the chart, as its comment and default say it."""

    path: str
    default: Any
    text: str


def values(text: str) -> Iterator[Value]:
    """The commented values of a values.yaml, in their order. What lies below a commented value is part of it."""
    data = yaml.safe_load(text)
    parents: list[tuple[int, str]] = []
    comment = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(MARK):
            comment = stripped.removeprefix(MARK).strip()
        elif found := re.match(r"^( *)([A-Za-z]+):", line):
            indent = len(found[1])
            parents = [(depth, name) for depth, name in parents if depth < indent]
            parents.append((indent, found[2]))
            if comment:
                path = [name for _, name in parents]
                yield Value(".".join(path), _at(data, path), comment)
                comment = ""


def _at(data: Any, path: list[str]) -> Any:
    for name in path:
        data = data[name]
    return data


def values_table(text: str) -> str:
    """The table of values as Markdown."""
    rows = ["| value | default | what |", "|---|---|---|"]
    for value in values(text):
        default = yaml.safe_dump(value.default, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
        rows.append(f"| `{value.path}` | `{default}` | {value.text} |")
    return "\n".join(rows)


def rights_table(text: str) -> str:
    """The table of what the operator may do as Markdown: a line for each verb."""
    rows = ["| where | resources | verb | what for |", "|---|---|---|---|"]
    for where, rules in yaml.safe_load(text).items():
        for rule in rules:
            group = f" ({rule['group']})" if rule["group"] else ""
            named = f", the {rule['named']}'s alone" if "named" in rule else ""
            resources = ", ".join(f"`{name}`" for name in rule["resources"]) + named + group
            rows += [f"| {where} | {resources} | `{verb}` | {purpose} |" for verb, purpose in rule["verbs"].items()]
    return "\n".join(rows)


def between(page: str, name: str, content: str) -> str:
    """The page with `content` between its markers `<!-- name -->` and `<!-- end of name -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def files(root: Path = ROOT) -> dict[Path, str]:
    """Text of every generated file, by its path in the tree."""
    copies = {
        CHART / "files" / "crds" / path.name: path.read_text(encoding="utf-8")
        for path in sorted((root / "crds/manifests").glob("*.yaml"))
    }
    page = (root / PAGE).read_text(encoding="utf-8")
    page = between(page, "values", values_table((root / CHART / "values.yaml").read_text(encoding="utf-8")))
    page = between(page, "rights", rights_table((root / CHART / "files/rbac.yaml").read_text(encoding="utf-8")))
    return copies | {PAGE: page}


if __name__ == "__main__":
    for path in write(ROOT, files(ROOT)):
        sys.stdout.write(f"{path}\n")
