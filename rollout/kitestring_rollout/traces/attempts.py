"""Attempts as the trainer gets them: proven complete, or lost."""

from __future__ import annotations

from dataclasses import dataclass

from kitestring_rollout.traces.decoder import decode_calls
from kitestring_rollout.traces.proof import CallSpan
from kitestring_rollout.traces.records import CallRecord, EndRecord


@dataclass(frozen=True, slots=True)
class ProvenAttempt:
    """Exactly the calls 1..N that the gateway admitted, and its end record."""

    attempt: str
    end: EndRecord
    spans: tuple[CallSpan, ...]
    """In the order of their numbers."""
    duplicates: int = 0
    """Copies of spans that were dropped."""
    late: int = 0
    """Spans beyond N that were ignored."""

    def calls(self) -> tuple[CallRecord, ...]:
        """Decoded on demand, ids and logprobs included; contents only where the reader was asked for them."""
        return decode_calls(self.spans)


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that is not provably complete: never trained on."""

    attempt: str
    reason: str
    end: EndRecord | None
    spans: tuple[CallSpan, ...]
    """What there is, in the order of the numbers."""

    def calls(self) -> tuple[CallRecord, ...]:
        """Those that can be decoded: to look at, not to train on."""
        return decode_calls(self.spans, skip_missing=True)
