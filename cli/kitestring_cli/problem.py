"""A mistake in a user's file: where it is, what was found, what is allowed, what to do."""

import json
from dataclasses import dataclass
from typing import Literal

FieldPath = tuple[str | int, ...]
"""Where something is in a document: names of fields and indexes of items."""

_LONGEST_FOUND = 80
"""Characters of a found value that are shown: enough to recognise it."""


@dataclass(frozen=True)
class Problem:
    """One mistake, or with `severity="note"` something worth saying that is no mistake.

    `document` counts the documents of a file from 1, None: the file as a whole; `line` counts from 1. `found` is what
    is there in words, "" where that says nothing; `allowed` and `remedy` likewise.
    """

    file: str
    what: str
    document: int | None = None
    kind: str = ""
    name: str = ""
    line: int | None = None
    path: FieldPath = ()
    found: str = ""
    allowed: str = ""
    remedy: str = ""
    severity: Literal["error", "note"] = "error"

    @property
    def where(self) -> str:
        """The path as text, such as `spec.policies[0].model.path`."""
        return path_text(self.path)

    def __str__(self) -> str:
        """One line, its beginning in the form that editors and terminals can jump to."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        if self.document is not None:
            resource = f"{self.kind or 'document'}/{self.name}" if self.name else self.kind
            place += f": {resource or 'document'} (document {self.document})"
        details = [self.what]
        if self.found:
            details.append(f"found {self.found}")
        if self.allowed:
            details.append(f"allowed: {self.allowed}")
        if self.remedy:
            details.append(f"remedy: {self.remedy}")
        text = "; ".join(details)
        label = "note: " if self.severity == "note" else ""
        return f"{place}: {label}{self.where}: {text}" if self.path else f"{place}: {label}{text}"

    def as_json(self) -> dict[str, object]:
        """The same as plain data."""
        return {
            "severity": self.severity,
            "file": self.file,
            "document": self.document,
            "kind": self.kind or None,
            "name": self.name or None,
            "line": self.line,
            "path": self.where or None,
            "problem": self.what,
            "found": self.found or None,
            "allowed": self.allowed or None,
            "remedy": self.remedy or None,
        }


def path_text(path: FieldPath) -> str:
    """`("spec", "policies", 0, "a.b")` as `spec.policies[0]["a.b"]`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.replace("_", "").replace("-", "").isalnum():
            text += f".{step}" if text else step
        else:
            text += f"[{json.dumps(step, ensure_ascii=False)}]"
    return text


def value_text(value: object) -> str:
    """A found value as a reader knows it from the file, shortened where it is long."""
    match value:
        case None:
            return "nothing"
        case dict():
            return f"an object with {', '.join(map(str, value))}" if value else "an empty object"
        case list():
            return f"a list of {len(value)} items" if len(value) != 1 else "a list of 1 item"
        case str():
            text = json.dumps(value, ensure_ascii=False)
        case bool():
            text = "true" if value else "false"
        case _:
            text = str(value)
    return text if len(text) <= _LONGEST_FOUND else f"{text[:_LONGEST_FOUND]}…"
