"""Folders in object storage: their files, and last a manifest that says what belongs to the folder.

A folder without a manifest does not exist; one that differs from its manifest is torn and is never used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from kitestring_rollout.storage.keys import check_key
from kitestring_rollout.storage.scratch import remove_abandoned, scratch_beside
from kitestring_rollout.storage.store import ObjectMissing, ObjectStore

MANIFEST = "manifest.json"
"""Name of the manifest's object beside the folder's files."""
_PARALLEL_FILES = 3
_T = TypeVar("_T")
_R = TypeVar("_R")


class FolderTorn(Exception):
    """What lies in storage, or on disk, is not what its manifest says; or the manifest itself is unusable."""


class FileEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, AfterValidator(check_key)] = Field(description="below the folder, with forward slashes")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """What a folder consists of. `path`s are those that `storage.keys` accepts, so none can leave the folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(min_length=1, max_length=200)
    files: tuple[FileEntry, ...]

    @field_validator("files")
    @classmethod
    def _one_folder(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        paths = sorted(entry.path.split("/") for entry in files)
        if [MANIFEST] in paths:
            raise ValueError(f"{MANIFEST} is the name of the manifest itself")
        for first, second in pairwise(paths):
            if second[: len(first)] == first:
                raise ValueError(f"{'/'.join(first)} is named twice, or is both a file and a folder")
        return files


def publish_folder(store: ObjectStore, folder: Path, prefix: str, version: str) -> Manifest:
    """Put every file of `folder` below `prefix`, and last the manifest; a folder that was there is replaced.

    Hidden files and folders are left out: storage holds no names that begin with a dot, and version control and
    download caches leave such ones in models. Durable when this returns. Raises `StoreUnavailable`, `KeyRefused` for
    another name that storage cannot hold, ValueError for a folder that cannot be told in a manifest, OSError.
    """
    paths = _files_of(folder)
    if not paths:
        raise ValueError(f"folder {folder} has no file to publish")
    if MANIFEST in paths:
        raise ValueError(f"folder {folder} has a file {MANIFEST}, which is the name of the manifest itself")
    store.delete(_key(prefix, MANIFEST))  # before its files are replaced: a reader must not mix two folders

    def put(path: str) -> FileEntry:
        store.put_file(_key(prefix, path), folder / path)
        return _entry(folder, path)

    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        manifest = Manifest(version=version, files=_all(pool, put, paths))
    store.put(_key(prefix, MANIFEST), manifest.model_dump_json().encode())
    return manifest


def read_manifest(store: ObjectStore, prefix: str) -> Manifest:
    """The manifest of the folder below `prefix`; raises `ObjectMissing` where there is no folder, `FolderTorn`."""
    data = store.get(_key(prefix, MANIFEST))
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FolderTorn(f"{_key(prefix, MANIFEST)} is no manifest: {where}: {first['msg']}") from error


def fetch_folder(store: ObjectStore, prefix: str, folder: Path) -> str:
    """Bring the folder below `prefix` to `folder`, which must not exist, verified; gives its version.

    `folder` appears whole or not at all. Raises `ObjectMissing` where there is no such folder in storage,
    `FolderTorn`, `StoreUnavailable`, OSError (FileExistsError among them).
    """
    if folder.exists():
        raise FileExistsError(17, "the folder is there already", str(folder))
    manifest = read_manifest(store, prefix)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder)

    def get(entry: FileEntry) -> None:
        path = scratch / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get_file(_key(prefix, entry.path), path)
        except ObjectMissing as error:
            raise FolderTorn(f"{_key(prefix, entry.path)} is named by the manifest and missing") from error
        _check(scratch, entry)

    with scratch_beside(folder) as scratch:
        scratch.mkdir()
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            _all(pool, get, manifest.files)
    return manifest.version


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Raise `FolderTorn` unless `folder` on disk holds exactly what `manifest` says. Reads every byte."""
    surplus = set(_files_of(folder)) - {entry.path for entry in manifest.files}
    if surplus:
        raise FolderTorn(f"{folder / min(surplus)} is no part of version {manifest.version}")
    for entry in manifest.files:
        _check(folder, entry)


def remove_folder(store: ObjectStore, prefix: str) -> None:
    """Remove the folder below `prefix`, whole or half, manifest first; nothing happens where there is none."""
    if not prefix.strip("/"):
        raise ValueError("the store itself is no folder to remove")
    store.delete(_key(prefix, MANIFEST))
    for info in list(store.list(_key(prefix, ""))):
        store.delete(info.key)


def _key(prefix: str, path: str) -> str:
    folder = prefix.rstrip("/")
    return f"{folder}/{path}" if folder else path


def _files_of(folder: Path) -> list[str]:
    """Paths of all files below `folder`, hidden ones aside, in order. Links to files count as files; links to folders
    are refused."""
    paths = []
    for root, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (Path(root) / name).is_symlink():
                raise ValueError(f"{Path(root) / name} is a link to a folder, which a published folder cannot hold")
        paths += [(Path(root) / name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return sorted(paths)


def _raise(error: OSError) -> None:
    raise error


def _entry(folder: Path, path: str) -> FileEntry:
    with (folder / path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(path=path, bytes=file.tell(), sha256=digest)


def _check(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.path
    if not path.is_file():
        raise FolderTorn(f"{path} is missing")
    size = path.stat().st_size
    if size != entry.bytes:
        raise FolderTorn(f"{entry.path} has {size} bytes, its manifest says {entry.bytes}")
    found = _entry(folder, entry.path).sha256
    if found != entry.sha256:
        raise FolderTorn(f"{entry.path} has SHA-256 {found}, its manifest says {entry.sha256}")


def _all(pool: ThreadPoolExecutor, work: Callable[[_T], _R], items: Iterable[_T]) -> tuple[_R, ...]:
    """Results in order; after the first failure nothing more is begun."""
    futures = [pool.submit(work, item) for item in items]
    try:
        return tuple(future.result() for future in futures)
    finally:
        pool.shutdown(cancel_futures=True)
