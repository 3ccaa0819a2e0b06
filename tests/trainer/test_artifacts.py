"""Resumable states on their way into storage, while the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kitestring_trainer.artifacts import StateUploads


def test_one_state_at_a_time_and_none_is_left_behind() -> None:
    """A state stays on disk for two more: while one is put, the next may be written, not the one after that."""
    began, go_on = threading.Event(), threading.Event()
    putting: set[int] = set()
    found: list[set[int]] = []
    done: list[int] = []

    def put(_: Path, step: int) -> None:
        putting.add(step)
        if step == 1:
            began.set()
            assert go_on.wait(20)
        else:
            found.append(set(putting))
            go_on.set()
        putting.remove(step)
        done.append(step)

    class Watched(StateUploads):
        def wait(self, seconds: float | None) -> bool:
            if seconds is None and began.is_set():  # only who waits for its end lets the first one end
                go_on.set()
            return super().wait(seconds)

    uploads = Watched(put)
    assert uploads.wait(0)
    uploads.begin(Path("state-1"), 1)
    assert began.wait(20), "the run does not wait for it"
    assert not uploads.wait(0)
    uploads.begin(Path("state-2"), 2)
    assert uploads.wait(20) and done == [1, 2]
    assert found == [{2}], "never two at a time"


def test_what_went_wrong_comes_out_where_it_is_awaited() -> None:
    def put(_: Path, step: int) -> None:
        raise ValueError(f"step {step}")

    uploads = StateUploads(put)
    uploads.begin(Path("state-1"), 1)
    with pytest.raises(ValueError, match="step 1"):
        uploads.begin(Path("state-2"), 2)
    assert uploads.wait(20), "and only once"
