"""A resumable state whose parts lie on the disks of several machines: brought together on the driver's, and handed out.

Every training process writes its own shard, on its own machine. The driver's machine keeps all of them, since it alone
puts states into storage and brings them from there. Standard library only; who calls whom is the worker group's matter.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 4 * 2**20
"""All processes send one at the same time, through Ray's small object store."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a file."""

    path: str
    """Below the folder."""
    offset: int
    data: bytes


def own_shards(folder: Path, rank: int) -> list[Path]:
    """The files in `folder` that process `rank` alone writes and reads."""
    return sorted(folder.rglob(f"*_rank_{rank}.pt"))


def read_chunk(folder: Path, rank: int, number: int, size: int = CHUNK_BYTES) -> Chunk | None:
    """The piece `number` (from 0) of the shards of `rank`, one file after another; None when there are no more."""
    for path in own_shards(folder, rank):
        pieces = max(1, -(-path.stat().st_size // size))
        if number < pieces:
            with path.open("rb") as file:
                file.seek(number * size)
                return Chunk(path.relative_to(folder).as_posix(), number * size, file.read(size))
        number -= pieces
    return None


def write_chunk(folder: Path, chunk: Chunk) -> None:
    """Pieces of a file are written in order."""
    path = folder / chunk.path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb" if chunk.offset == 0 else "r+b") as file:
        file.seek(chunk.offset)
        file.write(chunk.data)


class Probe:
    """A file in a folder by which another process can tell whether it sees the same folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"probe-{uuid.uuid4().hex}"

    def __enter__(self) -> Path:
        self.path.touch()
        return self.path

    def __exit__(self, *_: object) -> None:
        self.path.unlink()


def collect(folder: Path, send: Callable[[int], Sequence[Chunk | None]]) -> None:
    """Bring the shards of all processes into `folder`. `send(number)`: that piece of each process; None for one that
    has no more, or whose folder this is."""
    number = 0
    while any(chunks := send(number)):
        for chunk in filter(None, chunks):
            write_chunk(folder, chunk)
        number += 1


def hand_out(folder: Path, wanted: Sequence[bool], take: Callable[[list[Chunk | None]], object]) -> None:
    """Give each process (by rank) that wants it its shards. `take(pieces)` hands one to each; None: nothing."""
    number = 0
    while any(chunks := [read_chunk(folder, rank, number) if want else None for rank, want in enumerate(wanted)]):
        take(chunks)
        number += 1
