"""The stores under test: a folder, and a bucket on a real SeaweedFS started once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from kitestring_rollout.storage import DirectoryStore, ObjectStore, S3StoreConfig, open_store
from tests.storage.seaweed import running_seaweed


@pytest.fixture(scope="session")
def s3_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3StoreConfig]:
    """Config of a bucket on a SeaweedFS of this session's own."""
    with running_seaweed(tmp_path_factory.mktemp("seaweedfs")) as seaweed:
        yield seaweed.config


@pytest.fixture(params=["directory", "s3"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ObjectStore]:
    """Opens the test's own empty store, the same one every time."""
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path / "store")
    config: S3StoreConfig = request.getfixturevalue("s3_config")
    config = config.model_copy(update={"prefix": f"runs/{uuid4().hex}"})
    return lambda: open_store(config)


@pytest.fixture
def store(open_again: Callable[[], ObjectStore]) -> ObjectStore:
    return open_again()
