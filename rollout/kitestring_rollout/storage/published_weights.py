"""The policy's weights in a run's storage: a folder per version, and the version that servers are to serve.

`weights/{version}/…` with a manifest, and `weights/current.json`: `{"version"}`, written before servers are told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from kitestring_api.names import PREFIX_WEIGHTS
from kitestring_rollout.storage.manifest import FolderTorn, publish_folder, remove_folder
from kitestring_rollout.storage.store import ObjectMissing, ObjectStore

CURRENT = f"{PREFIX_WEIGHTS}current.json"
INITIAL = "initial"
"""The link beside the versions on a server's disk on which it starts."""
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_version(version: str) -> str:
    """Give the version back, or raise ValueError: it names a folder, in storage and on the disks of servers."""
    if _VERSION.fullmatch(version) is None or version == INITIAL:
        raise ValueError(
            f"{version!r} is no version: letters, digits, dots, dashes and underscores, at most 100, not {INITIAL}"
        )
    return version


def is_superseded(version: str, by: str | None) -> bool:
    """Whether `by` is of a later start of the trainer. Versions are `{incarnation}.{push}`; others never are."""
    found = [re.match(r"[0-9]+(?=\.)", name) for name in (version, by or "")]
    return found[0] is not None and found[1] is not None and int(found[0][0]) < int(found[1][0])


def weights_prefix(version: str) -> str:
    """Where the folder of a version lies in storage."""
    return f"{PREFIX_WEIGHTS}{check_version(version)}/"


def publish_weights(store: ObjectStore, folder: Path, version: str) -> None:
    """Put a folder of weights as `version`; nobody serves it yet. Raises as `publish_folder`."""
    publish_folder(store, folder, weights_prefix(version), version)


def set_current(store: ObjectStore, version: str) -> None:
    """From now on servers are to serve `version`, which was published. Raises `StoreUnavailable`."""
    store.put(CURRENT, json.dumps({"version": check_version(version)}).encode())


def current_version(store: ObjectStore) -> str | None:
    """The version that servers are to serve; None before the first. Raises `StoreUnavailable`, `FolderTorn`."""
    try:
        data = store.get(CURRENT)
    except ObjectMissing:
        return None
    try:
        return check_version(json.loads(data)["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise FolderTorn(f"{CURRENT} does not name a version: {error}") from error


def remove_versions(store: ObjectStore, keep: Collection[str]) -> list[str]:
    """Remove the folders of all versions but those to keep; the versions removed."""
    found = {
        info.key.removeprefix(PREFIX_WEIGHTS).split("/")[0]
        for info in store.list(PREFIX_WEIGHTS)
        if info.key != CURRENT
    }
    removed = sorted(found - set(keep))
    for version in removed:
        remove_folder(store, f"{PREFIX_WEIGHTS}{version}/")
    return removed
