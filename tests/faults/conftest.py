"""Whole runs as a user starts them: `kitestring run` in a process of its own, in a folder of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from local_run import LocalRun, write_files

from tests.storage.seaweed import Seaweed, running_seaweed


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.policy_server.tiny_policy import make_policy

    return make_policy(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start_run(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., LocalRun]]:
    """Starts a run; whatever the test leaves running is ended, and must leave no process behind."""
    started: list[LocalRun] = []

    def start(tasks: list[dict[str, object]], *overrides: str, **shape: object) -> LocalRun:
        files = write_files(tmp_path, tiny_model, tasks, **shape)
        run = LocalRun(tmp_path, files, overrides)
        started.append(run)
        return run

    yield start
    for run in started:
        run.end()


@pytest.fixture
def seaweed(tmp_path: Path) -> Iterator[Seaweed]:
    folder = tmp_path / "seaweed"
    folder.mkdir()
    with running_seaweed(folder) as server:
        yield server
