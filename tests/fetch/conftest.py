"""A bucket on a real SeaweedFS of this session's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from kitestring_rollout.storage import ObjectStore, S3StoreConfig, open_store
from tests.storage.seaweed import running_seaweed


@pytest.fixture(scope="session")
def s3_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3StoreConfig]:
    with running_seaweed(tmp_path_factory.mktemp("seaweedfs")) as seaweed:
        yield seaweed.config


@pytest.fixture
def prefix() -> str:
    """Of this test's own objects."""
    return f"inputs/{uuid4().hex}"


@pytest.fixture
def bucket(s3_config: S3StoreConfig, prefix: str) -> ObjectStore:
    """What lies below the prefix."""
    return open_store(s3_config.model_copy(update={"prefix": prefix}))


@pytest.fixture
def source(s3_config: S3StoreConfig) -> dict[str, Any]:
    """Fields of an `s3` item, but for its key or prefix."""
    return s3_config.model_dump(mode="json", exclude={"kind", "prefix", "connections"})
