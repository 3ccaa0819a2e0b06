"""Proofs of attempts: a thread that tails the trace store while an attempt is awaited."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kitestring_rollout.storage import StoreUnavailable
from kitestring_rollout.traces.records import CallRecord, EndRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proof:
    """An attempt proven complete: exactly the calls 1..N that its gateway admitted."""

    attempt: str
    end: EndRecord
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True, slots=True)
class Disproof:
    """An attempt whose records contradict each other: it can never be proven complete."""

    attempt: str
    reason: str


class ProofSource(Protocol):
    """What is new in the trace store."""

    def poll(self, wanted: Callable[[str], bool]) -> Iterable[Proof | Disproof]:
        """Attempts that became complete since the last call; those not wanted are let go, undecoded.

        Raises StoreUnavailable.
        """

    def forget(self, attempt: str) -> None:
        """Let go of what is held of an attempt that will never be wanted."""


class ProofWatch:
    """Polls a ProofSource in a thread of its own while anything is awaited, and hands over what it finds."""

    def __init__(
        self,
        source: ProofSource,
        found: Callable[[Proof | Disproof], None],
        broke: Callable[[BaseException], None],
        *,
        poll_seconds: float,
        retry_seconds: float = 0.5,
    ) -> None:
        """`found` and `broke` are called in the thread; `broke` with the error of a bug, after which it has ended."""
        self._source = source
        self._found = found
        self._broke = broke
        self._poll_seconds = poll_seconds
        self._retry_seconds = retry_seconds
        self._awaited: set[str] = set()
        self._forgotten: list[str] = []
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self.read_since: float | None = None
        """Monotonic time since when the store could be read without a break; None while it cannot."""
        self._thread = threading.Thread(target=self._run, name="proofs", daemon=True)

    def start(self) -> None:
        self.read_since = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopped.set()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def expect(self, attempt: str) -> None:
        """Look for this attempt from now on; records written before are found too."""
        with self._changed:
            self._awaited.add(attempt)
            self._changed.notify()

    def drop(self, attempt: str) -> None:
        """It is not awaited any more."""
        with self._changed:
            self._awaited.discard(attempt)
            self._forgotten.append(attempt)

    def _wanted(self, attempt: str) -> bool:
        with self._changed:
            return attempt in self._awaited

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._turn()
        except BaseException as error:  # noqa: BLE001  the thread's boundary: the run ends with this error
            self._broke(error)

    def _turn(self) -> None:
        with self._changed:
            while not self._awaited and not self._stopped.is_set():
                self._changed.wait()
            forgotten, self._forgotten = self._forgotten, []
        for attempt in forgotten:
            self._source.forget(attempt)
        if not self._stopped.is_set():
            self._stopped.wait(self._poll_once())

    def _poll_once(self) -> float:
        """One look into the store; the seconds to pause before the next: a fifth of a core is spent on it at most.

        The pause follows the CPU time of the look, not its wall time: a look that waited for a store that was away must
        not be followed by a pause of four times as long, in which attempts would be taken for lost.
        """
        began = time.thread_time()
        try:
            for item in self._source.poll(self._wanted):
                with self._changed:
                    self._awaited.discard(item.attempt)
                self._found(item)
        except StoreUnavailable as error:
            if self.read_since is not None:
                logger.warning("traces cannot be read, waiting: %s", error)
            self.read_since = None
            return self._retry_seconds
        if self.read_since is None:
            logger.info("traces can be read again")
            self.read_since = time.monotonic()
        return max(self._poll_seconds, 4 * (time.thread_time() - began))
