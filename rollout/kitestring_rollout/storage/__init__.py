"""Object storage of a run: one interface, a folder and S3 behind it."""

from kitestring_rollout.storage.config import DirectoryStoreConfig, S3StoreConfig, StoreConfig
from kitestring_rollout.storage.directory_store import DirectoryStore
from kitestring_rollout.storage.keys import KeyRefused
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
    "KeyRefused",
    "ObjectExists",
    "ObjectInfo",
    "ObjectMissing",
    "ObjectStore",
    "S3StoreConfig",
    "StoreConfig",
    "StoreRefused",
    "StoreUnavailable",
    "open_store",
]
