"""The rows of a task file: which are usable, what of them the agent sees, and what only the scorer sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from kitestring_api import names
from kitestring_api.v1alpha1.agent_protocol import TaskDelivery
from kitestring_trainer.errors import UserMistakeError

ARGUMENT_BYTES = 128 * 1024
"""Linux: MAX_ARG_STRLEN, the end's NUL included, of an argument and of a variable with its name."""
TaskFormat = Literal["jsonl", "parquet"]
_SHOWN = 3
"""Invalid rows named in a message; the others are counted."""


@dataclass(frozen=True, slots=True)
class TaskFields:
    """Fields that are named in the TrainingRun and the pool. `required` are fields that every row must have."""

    hidden: frozenset[str] = frozenset()
    visible: tuple[str, ...] | None = None
    """None: all but the hidden ones."""
    required: tuple[tuple[str, str], ...] = ()
    """(field of the row, where it is named)"""
    delivery: TaskDelivery = field(default_factory=TaskDelivery)
    """How a task is handed to the agent."""


@dataclass(frozen=True, slots=True)
class Task:
    """One usable row, split."""

    visible: dict[str, Any]
    hidden: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskSet:
    """All rows of a file, in order: `rows[i]` is a Task, or the reason (one line) why row i can never be used."""

    source: str
    rows: tuple[Task | str, ...]
    invalid: tuple[int, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.rows)

    def task(self, row: int) -> Task:
        """The usable row `row`; a KeyError for one that is not."""
        found = self.rows[row]
        if isinstance(found, str):
            raise KeyError(found)
        return found

    def problem(self, row: int) -> str | None:
        found = self.rows[row]
        return found if isinstance(found, str) else None

    def report(self) -> str | None:
        """One line on the rows that cannot be used; None when all can."""
        if not self.invalid:
            return None
        shown = "; ".join(f"row {row}: {self.rows[row]}" for row in self.invalid[:_SHOWN])
        more = f"; and {len(self.invalid) - _SHOWN} more" if len(self.invalid) > _SHOWN else ""
        return f"{self.source}: {len(self.invalid)} of {len(self.rows)} rows cannot be used ({shown}{more})"


def load_tasks(
    source: Path | Sequence[dict[str, Any]], fields: TaskFields, *, format: TaskFormat | None, limit: int | None
) -> TaskSet:
    """Read and split the rows of a file, or of the run's own text.

    A row that is no object or lacks a named field is kept as invalid, so that the numbers of the others do not change.
    Raises UserMistakeError for a file that is missing, empty or of another format, and when no row is usable.
    """
    name = str(source) if isinstance(source, Path) else "spec.tasks inline"
    raw = _read(source, format) if isinstance(source, Path) else iter(source)
    rows: list[Task | str] = []
    for row in raw:
        if limit is not None and len(rows) >= limit:
            break
        rows.append(split(row, fields) if not isinstance(row, _Unreadable) else row.reason)
    if not rows:
        raise UserMistakeError(f'{name}: no task in it; write one JSON object per line, e.g. {{"question": "2+3"}}')
    invalid = tuple(index for index, row in enumerate(rows) if isinstance(row, str))
    if len(invalid) == len(rows):
        raise UserMistakeError(f"{name}: none of its {len(rows)} rows can be used; row 0: {rows[0]}")
    return TaskSet(source=name, rows=tuple(rows), invalid=invalid)


def split(row: object, fields: TaskFields) -> Task | str:
    """Visible and hidden part of a row, or why it cannot be used."""
    if not isinstance(row, dict):
        return f"is {_kind(row)}; allowed: a JSON object"
    for name, where in fields.required:
        if name not in row:
            present = ", ".join(sorted(map(str, row))) or "none"
            return f"has no field {name!r}, which {where} names; its fields: {present}"
    hidden = {key: value for key, value in row.items() if key in fields.hidden}
    keep = fields.visible
    visible = {key: value for key, value in row.items() if key not in hidden and (keep is None or key in keep)}
    return undeliverable(visible, fields.delivery) or Task(visible=visible, hidden=hidden)


def undeliverable(visible: dict[str, Any], delivery: TaskDelivery) -> str | None:
    """Why no agent can ever be started with this task; None where it can be handed over."""
    if delivery.from_ not in ("argument", "environment"):
        return None
    whole = visible if delivery.field is None else visible.get(delivery.field)
    text = whole.encode() if isinstance(whole, str) else orjson.dumps(whole)
    remedy = "use agentProtocol.task.from: file or stdin"
    if b"\0" in text:
        return f"has a NUL, which no {delivery.from_} can hold; {remedy}"
    if delivery.from_ == "environment":
        text = f"{names.ENV_TASK}=".encode() + text
    if len(text) >= ARGUMENT_BYTES:
        return f"is too long ({len(text)} bytes) for the {delivery.from_}, which holds {ARGUMENT_BYTES - 1}; {remedy}"
    return None


@dataclass(frozen=True, slots=True)
class _Unreadable:
    reason: str


def _read(path: Path, format: TaskFormat | None) -> Iterator[object]:
    kind = format or {".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix)
    if kind is None:
        raise UserMistakeError(
            f"{path}: suffix {path.suffix!r} says no format; allowed: .jsonl, .parquet, or format set in spec.tasks"
        )
    if not path.is_file():
        raise UserMistakeError(
            f"{path}: no such file; set spec.tasks.train.path or validation.path to a task file; on a cluster that is "
            "a path in the trainer's image: bring tasks of your own by inline, configMap, s3 or pvc"
        )
    return _jsonl(path) if kind == "jsonl" else _parquet(path)


def _jsonl(path: Path) -> Iterator[object]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield _Unreadable(f"line {number} is not JSON: {error}")


def _parquet(path: Path) -> Iterator[object]:
    import pyarrow  # noqa: PLC0415  heavy
    import pyarrow.parquet  # noqa: PLC0415

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserMistakeError(f"{path}: not a Parquet file: {error}") from error
    for batch in file.iter_batches(batch_size=1024):
        yield from _plain(batch.to_pylist())


def _plain(rows: Iterable[dict[str, Any]]) -> Iterator[object]:
    """Rows as the JSON that an agent and a scorer get; a value that JSON cannot hold spoils its row."""
    for row in rows:
        try:
            yield orjson.loads(orjson.dumps(row))
        except TypeError as error:
            yield _Unreadable(f"cannot be written as JSON: {error}")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "a string" if isinstance(value, str) else "an array"
