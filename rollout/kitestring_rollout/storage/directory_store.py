"""Object storage in a folder of this machine: atomic and durable, the default of local runs."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias
from uuid import uuid4

from kitestring_rollout.storage.keys import KeyRefused, check_key, check_prefix
from kitestring_rollout.storage.scratch import scratch_beside
from kitestring_rollout.storage.store import ObjectExists, ObjectInfo, ObjectMissing, StoreUnavailable

_SCRATCH = ".tmp"
"""Folder of unfinished objects below the root: no key can name it, and listing skips it."""
_Entries: TypeAlias = list[tuple[str, int | None]]
_COPIED_BYTES = 1 << 20
_ABANDONED_SECONDS = 3600.0
"""An unfinished object this old belongs to a process that died."""


class DirectoryStore:
    """`ObjectStore` in folder `root`: a key is a path below it.

    An object is written to a scratch file, fsynced, and renamed (or, with `if_absent`, linked) into place; then the
    folder is fsynced. Where one key is a folder of another (`a` and `a/b`), the second is refused.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._scratch = root / _SCRATCH
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unavailable(error) from error
        self._has_scratch = False

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._put(key, io.BytesIO(data), if_absent)

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            self._put(key, source, if_absent=False)

    def _put(self, key: str, source: BinaryIO, if_absent: bool) -> None:
        path = self._path(key)
        scratch = self._scratch / uuid4().hex
        try:
            self._make_scratch()
            _write_synced(scratch, source)
            try:
                self._make_folders(path.parent)
                if if_absent:
                    os.link(scratch, path)
                else:
                    scratch.replace(path)
                _sync_folder(path.parent)
            finally:
                scratch.unlink(missing_ok=True)
        except FileExistsError as error:
            raise ObjectExists(key) from error
        except (IsADirectoryError, NotADirectoryError) as error:
            raise KeyRefused(
                f"object key {key!r} is refused: another key is a folder of it, or it of another"
            ) from error
        except OSError as error:
            raise self._unavailable(error) from error

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            self._check_root()
            raise ObjectMissing(key) from error
        except OSError as error:
            raise self._unavailable(error) from error

    def get_file(self, key: str, path: Path) -> None:
        with scratch_beside(path) as scratch:
            try:
                source = self._path(key).open("rb")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                self._check_root()
                raise ObjectMissing(key) from error
            except OSError as error:
                raise self._unavailable(error) from error
            with source, scratch.open("wb") as target:
                shutil.copyfileobj(source, target, _COPIED_BYTES)

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        self._check_root()
        folder = prefix.rpartition("/")[0]
        yield from self._walk(f"{folder}/" if folder else "", prefix, start_after or "")

    def exists(self, key: str) -> bool:
        try:
            found = self._path(key).is_file()
        except OSError as error:
            raise self._unavailable(error) from error
        if not found:
            self._check_root()
        return found

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink()
            _sync_folder(path.parent)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            self._check_root()
        except OSError as error:
            raise self._unavailable(error) from error

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Objects below `folder` (empty or ending in `/`); folders that lie wholly before `after` are never opened."""
        for name, size in self._entries(folder):
            key = folder + name
            if size is not None:
                if key > after and key.startswith(prefix):
                    yield ObjectInfo(key, size)
            elif (key > after or after.startswith(key)) and (key.startswith(prefix) or prefix.startswith(key)):
                yield from self._walk(key, prefix, after)

    def _entries(self, folder: str) -> _Entries:
        """(name, size) of files and (name + "/", None) of folders in the order of the keys below them."""
        entries: _Entries = []
        try:
            with os.scandir(self._root / folder) as scan:
                for entry in scan:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        entries.append((entry.name + "/", None))
                    else:
                        entries.append((entry.name, entry.stat().st_size))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unavailable(error) from error
        entries.sort()
        return entries

    def _make_folders(self, folder: Path) -> None:
        """Create `folder` durably, but never the root: a root that went away must not come back empty."""
        missing = []
        while not folder.is_dir():
            if folder == self._root:
                raise FileNotFoundError(2, "the folder of the store is gone", str(folder))
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            try:
                made.mkdir(exist_ok=True)
            except FileExistsError as error:  # a file of that name: another key
                raise NotADirectoryError(*error.args) from error
            _sync_folder(made.parent)

    def _check_root(self) -> None:
        if not self._root.is_dir():
            raise StoreUnavailable(f"the store's folder {self._root} is gone")

    def _make_scratch(self) -> None:
        """Before the first write, not before: whoever only reads needs no right to write."""
        if self._has_scratch:
            return
        self._scratch.mkdir(exist_ok=True)
        oldest = time.time() - _ABANDONED_SECONDS
        for path in self._scratch.iterdir():
            try:
                if path.stat().st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:  # another process of the run was faster
                continue
        self._has_scratch = True

    def _unavailable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"the store in {self._root} cannot serve: {error.strerror or error}")


def _write_synced(path: Path, source: BinaryIO) -> None:
    with path.open("xb") as file:
        try:
            shutil.copyfileobj(source, file, _COPIED_BYTES)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
