"""Resumable states on their way into storage, while the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kitestring_trainer.artifacts import StateUploads


def test_one_state_at_a_time_and_none_is_left_behind() -> None:
    """A state stays on disk for two more: while one is put, the next may be written, not the one after that."""
    go_on = {1: threading.Event(), 2: threading.Event()}
    began = {1: threading.Event(), 2: threading.Event()}
    done: list[int] = []

    def put(_: Path, step: int) -> None:
        began[step].set()
        go_on[step].wait(20)
        done.append(step)

    uploads = StateUploads(put)
    assert uploads.wait(0)
    uploads.begin(Path("state-1"), 1)
    assert began[1].wait(20), "the run does not wait for it"
    assert not uploads.wait(0)
    second = threading.Thread(target=uploads.begin, args=(Path("state-2"), 2))
    second.start()
    assert not began[2].is_set() and second.is_alive()
    go_on[1].set()
    second.join(20)
    assert began[2].wait(20) and done == [1]
    go_on[2].set()
    assert uploads.wait(20) and done == [1, 2]


def test_what_went_wrong_comes_out_where_it_is_awaited() -> None:
    def put(_: Path, step: int) -> None:
        raise ValueError(f"step {step}")

    uploads = StateUploads(put)
    uploads.begin(Path("state-1"), 1)
    with pytest.raises(ValueError, match="step 1"):
        uploads.begin(Path("state-2"), 2)
    assert uploads.wait(20), "and only once"
