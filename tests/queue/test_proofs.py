"""The watch over the trace store: how it paces itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from kitestring_trainer.queue.proofs import Disproof, Proof, ProofWatch


class SlowOnce:
    """A source whose first look waits for a store that is away, and whose second look finds the attempt."""

    def __init__(self, away_seconds: float) -> None:
        self._away_seconds = away_seconds
        self._looks = 0

    def poll(self, wanted: Callable[[str], bool]) -> Iterable[Proof | Disproof]:
        self._looks += 1
        if self._looks == 1:
            time.sleep(self._away_seconds)  # what a stalled connection does
            return []
        return [Disproof("a", "found")] if wanted("a") else []

    def forget(self, attempt: str) -> None:
        """Nothing is held."""


def test_a_look_that_waited_for_the_store_is_followed_by_the_next_at_once() -> None:
    found = threading.Event()
    watch = ProofWatch(SlowOnce(0.5), lambda _: found.set(), lambda error: None, poll_seconds=0.01)
    watch.start()
    began = time.monotonic()
    watch.expect("a")
    assert found.wait(10)
    watch.stop()
    assert time.monotonic() - began < 1.5, "a pause after the wall time of the look would take 2 s more"
