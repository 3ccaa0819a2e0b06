"""From a config to the store it names."""

from __future__ import annotations

from kitestring_rollout.storage.config import DirectoryStoreConfig, StoreConfig
from kitestring_rollout.storage.directory_store import DirectoryStore
from kitestring_rollout.storage.store import ObjectStore


def open_store(config: StoreConfig) -> ObjectStore:
    """The store that `config` names; raises `StoreUnavailable` when it cannot serve,
    OSError when a credential file cannot be read."""
    if isinstance(config, DirectoryStoreConfig):
        return DirectoryStore(config.path)
    # The S3 client takes a tenth of a second to import: local runs do without.
    from kitestring_rollout.storage.s3_store import S3Store  # noqa: PLC0415

    return S3Store(config)
