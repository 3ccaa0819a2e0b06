"""One run for all tests of the thread: every part as a process, agents of every kind, a recorder in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.thread.stack import Thread, play


@pytest.fixture(scope="session")
def thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    yield from play(tmp_path_factory.mktemp("thread"))
