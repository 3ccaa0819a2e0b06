"""Attempts between the end of their agent and their settlement: closed by the gateway, then proven or given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kitestring_api.names import CLASS_INFRASTRUCTURE
from kitestring_rollout.traces.records import EndRecord
from kitestring_trainer.queue.closing import Closed
from kitestring_trainer.queue.proofs import Disproof, Proof, ProofWatch
from kitestring_trainer.queue.state import Ending

Settle = Callable[[str, Proof | Ending], None]
"""(attempt, its proof, or how it was lost). Called once for each attempt that was closed."""


@dataclass(slots=True)
class _Pending:
    closed: Closed | None = None
    proof: Proof | Disproof | None = None
    since: float = 0.0


class Settlements:
    """Brings together what the gateway confirmed and what storage proves, in whichever order they come.

    All methods run in the queue's event loop.
    """

    def __init__(self, watch: ProofWatch, settle: Settle, proof_seconds: float) -> None:
        self._watch = watch
        self._settle = settle
        self._proof_seconds = proof_seconds
        self._pending: dict[str, _Pending] = {}

    def begin(self, attempt: str) -> None:
        """The attempt is being closed: from now on its proof may appear."""
        self._pending[attempt] = _Pending()
        self._watch.expect(attempt)

    def closed(self, attempt: str, closed: Closed) -> None:
        """The attempt is closed; it is settled now, or when its proof has come or is overdue."""
        pending = self._pending[attempt]
        pending.closed = closed
        pending.since = time.monotonic()
        if not closed.provable:
            self._end(attempt, Ending(closed.klass, closed.reason))
        elif pending.proof is not None:
            self._match(attempt, closed, pending.proof)

    def found(self, item: Proof | Disproof) -> None:
        """Storage holds the attempt's records."""
        pending = self._pending.get(item.attempt)
        if pending is None:
            return
        pending.proof = item
        if pending.closed is not None:
            self._match(item.attempt, pending.closed, item)

    def give_up(self) -> None:
        """Settle as lost what does not appear in storage although storage can be read."""
        readable = self._watch.read_since
        if readable is None:
            return
        now = time.monotonic()
        for attempt, pending in list(self._pending.items()):
            if pending.closed is not None and now - max(pending.since, readable) >= self._proof_seconds:
                self._end(attempt, _lost(f"no proof within {self._proof_seconds:g} s of its end"))

    def drop(self, attempt: str) -> None:
        """Nobody wants it any more."""
        if self._pending.pop(attempt, None) is not None:
            self._watch.drop(attempt)

    def _match(self, attempt: str, closed: Closed, proof: Proof | Disproof) -> None:
        if isinstance(proof, Disproof):
            self._end(attempt, _lost(proof.reason))
        elif not _confirmed(proof.end, closed):
            self._end(attempt, _lost("its end record is not the one that the gateway confirmed"))
        else:
            self._end(attempt, proof)

    def _end(self, attempt: str, settled: Proof | Ending) -> None:
        self.drop(attempt)
        self._settle(attempt, settled)


def _confirmed(end: EndRecord, closed: Closed) -> bool:
    """Whether the end record is the one that was asked for: whoever can write traces could write another."""
    found = (end.n_calls, end.digest, end.outcome, end.reward, end.reward_source)
    return found == (closed.n_calls, closed.digest, closed.klass, closed.reward, closed.reward_source)


def _lost(reason: str) -> Ending:
    return Ending(CLASS_INFRASTRUCTURE, f"trace lost: {reason}")
