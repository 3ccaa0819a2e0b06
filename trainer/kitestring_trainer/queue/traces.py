"""The trace store as the queue and a resuming run read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.traces.attempts import LostAttempt, ProvenAttempt
from kitestring_rollout.traces.codec import PayloadCorrupt
from kitestring_rollout.traces.reader import TraceReader
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.queue.proofs import Disproof, Proof

CLOCKS_DIFFER_SECONDS = 60.0
"""How far the clocks of collectors and trainer may be apart."""


class TraceProofs:
    """Proofs of attempts as they come in; a `ProofSource`. `since` is the unix time before which nothing is awaited."""

    def __init__(self, store: ObjectStore, since: float) -> None:
        self._reader = TraceReader(store, since=since - CLOCKS_DIFFER_SECONDS)

    def poll(self, wanted: Callable[[str], bool]) -> Iterator[Proof | Disproof]:
        for decided in self._reader.poll():
            if wanted(decided.attempt):
                yield _decoded(decided)

    def forget(self, attempt: str) -> None:
        self._reader.release(attempt)


class TraceArchive:
    """What earlier incarnations wrote; an `Archive`."""

    def __init__(self, store: ObjectStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    def ended(self, since_unix: float, wanted: Callable[[str], bool]) -> list[Proof]:
        since = since_unix - CLOCKS_DIFFER_SECONDS
        reader = TraceReader(self._store, since=since, grace_seconds=float("inf"))
        proofs: list[Proof] = []

        def look() -> None:
            for decided in reader.poll():
                if isinstance(decided, ProvenAttempt) and wanted(decided.end.rollout):
                    decoded = _decoded(decided)
                    if isinstance(decoded, Proof):
                        proofs.append(decoded)

        self._ledger.persist(look)
        return proofs


def _decoded(decided: ProvenAttempt | LostAttempt) -> Proof | Disproof:
    if isinstance(decided, LostAttempt):
        return Disproof(decided.attempt, decided.reason)
    try:
        return Proof(decided.attempt, decided.end, decided.calls())
    except PayloadCorrupt as error:
        return Disproof(decided.attempt, str(error))
