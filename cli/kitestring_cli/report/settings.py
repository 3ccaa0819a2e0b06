"""The configuration of a run as a table: one row for each field that has a value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kitestring_cli.problem import FieldPath, path_text, value_text

_HIDDEN = "(not shown)"
_ROWS = 20
"""Inline rows and other long lists are only counted."""


def settings(resolved: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """(kind and name, its fields) of each resource that the run wrote down; none when the files are gone."""
    resources = []
    for path in sorted(resolved.glob("*.yaml"), reverse=True):  # the run before its pool
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(manifest, dict):
            title = f"{manifest.get('kind')} {(manifest.get('metadata') or {}).get('name')}"
            resources.append((title, [(path_text(path), text) for path, text in _fields(manifest.get("spec"), ())]))
    return resources


def _fields(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, str]]:
    if value is None or value in ({}, []):
        return
    match value:
        case dict():
            for name, item in value.items():
                if name == "value" and len(path) > 1 and path[-2] == "env":
                    yield (*path, name), _HIDDEN  # people put keys there
                else:
                    yield from _fields(item, (*path, name))
        case list() if all(isinstance(item, str | int | float) for item in value):
            yield path, ", ".join(map(str, value))
        case list() if len(value) <= _ROWS and path[-1] != "inline":
            for index, item in enumerate(value):
                yield from _fields(item, (*path, index))
        case _:
            yield path, value if isinstance(value, str) else value_text(value)
