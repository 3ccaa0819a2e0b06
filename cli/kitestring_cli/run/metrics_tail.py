"""The metrics file of a run, line by line as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class MetricsTail:
    """Gives the line of each step once; the file may not be there yet. Lines of an earlier incarnation are passed over,
    and so are those of validations between steps, which the status has too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            # A trainer that resumes drops the lines of the steps that it makes again.
            self._position = min(self._position, self._path.stat().st_size)
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                found = orjson.loads(line)
                if "rollouts_counted" in found:
                    yield found
