"""The one interface to object storage: what the parts of a run may assume of a bucket or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class ObjectMissing(KeyError):
    """There is no object of that key."""

    def __str__(self) -> str:
        return f"no object {self.args[0]!r}"


class ObjectExists(Exception):
    """`if_absent` was asked for and the object is there already."""

    def __str__(self) -> str:
        return f"object {self.args[0]!r} exists already"


class StoreUnavailable(Exception):
    """The store cannot serve now (away, full, read-only, not authorised); trying again later may help."""


class StoreRefused(StoreUnavailable):
    """The store is there and refuses: wrong credentials, rights or region, no such bucket. Waiting does not mend that;
    the message ends with what does."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int
    """Bytes."""


class ObjectStore(Protocol):
    """Objects by key; synchronous, safe to use from several threads.

    Every method raises `KeyRefused` for a key outside the rules of `keys` and `StoreUnavailable` when the store cannot
    serve. A reader sees an object whole or not at all.
    """

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write the object durably: when this returns it survives a crash of any process and of the machine.

        An object of that key is replaced, or with `if_absent` left alone and `ObjectExists` raised.
        """
        ...

    def get(self, key: str) -> bytes:
        """The object's bytes; raises `ObjectMissing`."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Write the object from a file of any size, in bounded memory; else as `put`. OSError: `path` is unreadable."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Write the object's bytes to `path`, whose folder exists, in bounded memory; raises `ObjectMissing`.

        `path` is replaced at the end, whole, or left as it was. OSError: it cannot be written. Not synced to disk.
        """
        ...

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and is greater than `start_after`, in order of the keys' UTF-8 bytes.

        Objects put before the call are all seen; objects put during it may be. Some servers (SeaweedFS) sort by path
        segment: they put `a/x` before `a.b`. Keys that are listed must not depend on that: next to a folder no name may
        go on from the folder's own with a character below `/`.
        """
        ...

    def exists(self, key: str) -> bool: ...

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens when there is none."""
        ...
