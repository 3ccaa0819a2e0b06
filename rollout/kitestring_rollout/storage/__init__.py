"""Object storage of a run: one interface, a folder and S3 behind it."""

from kitestring_rollout.storage.config import DirectoryStoreConfig, S3StoreConfig, StoreConfig
from kitestring_rollout.storage.directory_store import DirectoryStore
from kitestring_rollout.storage.keys import KeyRefused
from kitestring_rollout.storage.manifest import (
    FileEntry,
    FolderTorn,
    Manifest,
    fetch_folder,
    publish_folder,
    read_manifest,
    remove_folder,
    verify_folder,
)
from kitestring_rollout.storage.opening import open_store
from kitestring_rollout.storage.store import (
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    StoreRefused,
    StoreUnavailable,
)

__all__ = [
    "DirectoryStore",
    "DirectoryStoreConfig",
    "FileEntry",
    "FolderTorn",
    "KeyRefused",
    "Manifest",
    "ObjectExists",
    "ObjectInfo",
    "ObjectMissing",
    "ObjectStore",
    "S3StoreConfig",
    "StoreConfig",
    "StoreRefused",
    "StoreUnavailable",
    "fetch_folder",
    "open_store",
    "publish_folder",
    "read_manifest",
    "remove_folder",
    "verify_folder",
]
