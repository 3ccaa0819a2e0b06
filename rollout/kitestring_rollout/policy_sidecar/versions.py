"""The versions on the pod's disk, and the link on which the server starts."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from kitestring_rollout.storage import (
    FolderTorn,
    ObjectMissing,
    ObjectStore,
    fetch_folder,
    read_manifest,
    verify_folder,
)
from kitestring_rollout.storage.published_weights import INITIAL, check_version, weights_prefix
from kitestring_rollout.storage.scratch import scratch_beside


class VersionMissing(Exception):
    """Storage does not hold that version (any more)."""


class Versions:
    """Folders `root/{version}`, each whole and verified, and the link `root/initial`. One process at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._verified: set[str] = set()

    def folder(self, version: str) -> Path:
        return self._root / check_version(version)

    def bring(self, store: ObjectStore, version: str) -> None:
        """Have the version on disk. Raises VersionMissing, FolderTorn, StoreUnavailable, OSError."""
        folder, prefix = self.folder(version), weights_prefix(version)
        if version in self._verified and folder.is_dir():
            return
        try:
            if folder.exists():  # of an earlier process, which may not have come to write it to the disk
                try:
                    verify_folder(folder, read_manifest(store, prefix))
                except FolderTorn:
                    shutil.rmtree(folder)
            if not folder.exists():
                found = fetch_folder(store, prefix, folder)
                if found != version:
                    shutil.rmtree(folder)
                    raise FolderTorn(f"{prefix} holds version {found!r}")
        except ObjectMissing as error:
            raise VersionMissing(f"version {version} is not in storage: {error}") from error
        self._verified.add(version)

    def link(self, version: str) -> None:
        """Have the server start on this version from now on."""
        with scratch_beside(self._root / INITIAL) as scratch:
            scratch.symlink_to(version)

    def keep(self, versions: Collection[str]) -> None:
        """Remove all others, and what killed processes left."""
        for path in self._root.iterdir():
            if path.name not in versions and path.is_dir() and not path.is_symlink():
                self._verified.discard(path.name)
                shutil.rmtree(path)
