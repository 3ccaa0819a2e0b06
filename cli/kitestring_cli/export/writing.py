"""Where the rows of an export go: JSON lines or Parquet, row by row, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Literal, Protocol

import numpy as np
import orjson

from kitestring_api.errors import UserMistakeError

What = Literal["transitions", "messages"]
GROUP_ROWS: Final = 2048
"""Rows that are held before Parquet writes them."""
_JSON_TEXT: Final = ("messages", "tools")
"""Columns that Parquet holds as JSON text: their shape differs from row to row."""


class Sink(Protocol):
    def write(self, row: Mapping[str, Any]) -> None: ...


class JsonLines:
    """One object per line. Floats of 32 bits come back exactly: JSON holds the shortest text of the 64-bit value."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, row: Mapping[str, Any]) -> None:
        self._stream.write(orjson.dumps({name: _plain(value) for name, value in row.items()}) + b"\n")


class Parquet:
    """Token ids are int32, log-probabilities float32, lists of them zstd-compressed."""

    def __init__(self, path: Path, what: What, columns: Sequence[str]) -> None:
        import pyarrow  # noqa: PLC0415  heavy, and needed for Parquet only
        import pyarrow.parquet  # noqa: PLC0415

        self._arrow = pyarrow
        self._schema = _schema(pyarrow, columns)
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self._rows.append(
            {name: orjson.dumps(value).decode() if name in _JSON_TEXT else value for name, value in row.items()}
        )
        if len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []


@contextmanager
def open_sink(to: Path | None, what: What, columns: Sequence[str]) -> Iterator[Sink]:
    """The sink for `--to`; None: JSON lines on standard output. A file appears when it is whole, or not at all.

    Raises UserMistakeError.
    """
    if to is None:
        yield JsonLines(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    if to.suffix not in (".jsonl", ".parquet"):
        raise UserMistakeError(f"--to {to}: found suffix {to.suffix or 'none'}; allowed: .jsonl, .parquet")
    part = to.with_name(f".{to.name}.part")
    try:
        if to.suffix == ".jsonl":
            with part.open("wb") as stream:
                yield JsonLines(stream)
        else:
            _make_room(part)
            parquet = Parquet(part, what, columns)
            try:
                yield parquet
            finally:
                parquet.close()
        part.replace(to)
    except OSError as error:
        raise UserMistakeError(f"--to {to}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _make_room(path: Path) -> None:
    """Raises OSError when the file cannot be written, with the words of the system, which Arrow does not pass on."""
    path.open("wb").close()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _schema(arrow: Any, columns: Sequence[str]) -> Any:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    versions = arrow.struct([("version", text), ("start", arrow.int32()), ("end", arrow.int32())])
    types = {
        "step": whole, "task": whole, "seq": arrow.int32(), "choice": arrow.int32(), "row": arrow.int32(),
        "prompt_token_ids": arrow.list_(arrow.int32()), "response_token_ids": arrow.list_(arrow.int32()),
        "response_logprobs": arrow.list_(arrow.float32()), "policy_versions": arrow.list_(versions),
        "reward": real, "credit": real, "advantage": real, "loss_weight": real,
    }  # fmt: skip
    return arrow.schema([(name, types.get(name, text)) for name in columns])
