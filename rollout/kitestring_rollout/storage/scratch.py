"""Files and folders that appear whole: made under another name beside their place, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """A free path in `path`'s folder, for a file, a link or a folder that is renamed to `path` at the end of the block.

    When the block raises, what it made is removed. A file or link replaces the file of that name; a folder replaces
    nothing (OSError where one is there that holds something). A process that is killed leaves its scratch:
    `remove_abandoned`.
    """
    scratch = path.with_name(f"{_prefix(path)}{uuid4().hex[:12]}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        _remove(scratch)


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of their tries to make `path`; no other process may be at it."""
    for scratch in path.parent.iterdir():  # not glob: a name may hold its characters
        if scratch.name.startswith(_prefix(path)):
            _remove(scratch)


def _prefix(path: Path) -> str:
    return f".{path.name[:200]}.part-"


def _remove(scratch: Path) -> None:
    if scratch.is_dir() and not scratch.is_symlink():
        shutil.rmtree(scratch)
    else:
        scratch.unlink(missing_ok=True)
