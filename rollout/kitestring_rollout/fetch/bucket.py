"""Objects of a bucket into files and folders, each whole or not at all."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.fetch.config import S3Source
from kitestring_rollout.storage import (
    KeyRefused,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    StoreUnavailable,
    fetch_folder,
    open_store,
)
from kitestring_rollout.storage.manifest import MANIFEST, FolderTorn
from kitestring_rollout.storage.scratch import remove_abandoned, scratch_beside

_log = logging.getLogger(__name__)

_PARALLEL_FILES: Final = 3


def fetch_from_bucket(source: S3Source, to: Path, field: str) -> int:
    """Bring the object or the folder to `to`, which is not there; the bytes brought.

    Raises UserMistakeError naming `field`, StoreUnavailable, FolderTorn, OSError of the disk.
    """
    store = _open(source, field)
    remove_abandoned(to)
    where = f"bucket {source.bucket} at {source.endpoint}"
    if source.key is not None:
        try:
            store.get_file(source.key, to)
        except ObjectMissing:
            raise UserMistakeError(
                f"{field}.key: there is no object {source.key} in {where}; name one that is there"
            ) from None
        return to.stat().st_size
    found = list(store.list())
    if any(info.key == MANIFEST for info in found) and _fetch_published(store, to):
        return sum(info.size for info in found)
    wanted = [info for info in found if _is_file(info)]
    if not wanted:
        raise UserMistakeError(
            f"{field}.prefix: there is no object below {source.folder or '/'} in {where}; name the prefix of a folder "
            "that is there"
        )
    with scratch_beside(to) as scratch:
        scratch.mkdir()
        _fetch_all(store, wanted, scratch, field)
    return sum(info.size for info in wanted)


def _open(source: S3Source, field: str) -> ObjectStore:
    try:
        return open_store(source.store())
    except OSError as error:
        raise UserMistakeError(f"{field}: cannot read {error.filename}: {error.strerror}") from error


def _fetch_published(store: ObjectStore, to: Path) -> bool:
    """Bring a folder that Kitestring published, verified by its manifest; False: that is another's manifest.json."""
    try:
        version = fetch_folder(store, "", to)
    except FolderTorn as error:
        if "is no manifest" not in str(error):
            raise
        return False
    _log.info("%s: verified, version %s", to, version)
    return True


def _is_file(info: ObjectInfo) -> bool:
    """Not what consoles make to show an empty folder, nor what version control and caches leave beside a model."""
    return bool(info.key) and not info.key.endswith("/") and not any(s.startswith(".") for s in info.key.split("/"))


def _fetch_all(store: ObjectStore, wanted: list[ObjectInfo], folder: Path, field: str) -> None:
    def get(info: ObjectInfo) -> None:
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(info.key, path)
        size = path.stat().st_size
        if size != info.size:
            raise StoreUnavailable(
                f"object {info.key} has {size} bytes, {info.size} were announced: it is being changed"
            )
        _log.info("%s: %s", info.key, readable_bytes(size))

    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        futures = [pool.submit(get, info) for info in wanted]
        try:
            for future in futures:
                future.result()
        except KeyRefused as error:
            raise UserMistakeError(f"{field}.prefix: {error}; rename it, or name a prefix without it") from error
        except ObjectMissing as error:
            raise StoreUnavailable(f"{error}: it was removed while the folder was fetched") from error
        finally:
            pool.shutdown(cancel_futures=True)


def readable_bytes(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
