"""When an attempt is proven complete. Pure: spans in any order and number in, a verdict out.

COMPLETE ⇔ the end record was seen, it is of the one epoch of all spans, every call 1..N was seen, and the digest over
their payload hashes is the end record's. Every payload is checked against its hash when it comes in, and the hash binds
it to its attempt, epoch and number; so what is complete is exactly what the gateway wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.records import EndRecord


class CallSpan(NamedTuple):
    """A call as it was read: proven in itself, not decoded. (A tuple: there is one per call of a run.)"""

    epoch: str
    seq: int
    payload_sha256: bytes
    payload: str
    contents: dict[str, str] | None
    """Content attributes by name; None when the reader leaves them out."""


@dataclass(frozen=True, slots=True)
class EndSpan:
    epoch: str
    payload_sha256: bytes
    record: EndRecord


State = Literal["open", "incomplete", "complete", "contradictory"]


@dataclass(slots=True)
class AttemptSpans:
    """The spans of one attempt seen so far."""

    attempt: str
    calls: dict[int, CallSpan] = field(default_factory=dict)
    end: EndSpan | None = None
    duplicates: int = 0
    contradiction: str | None = None

    def add_call(self, span: CallSpan) -> None:
        known = self.calls.setdefault(span.seq, span)
        if known is span:
            return
        if known.payload_sha256 == span.payload_sha256:
            self.duplicates += 1
        else:
            self.contradiction = f"two different spans of call {span.seq}"

    def add_end(self, span: EndSpan) -> None:
        if self.end is None:
            self.end = span
        elif self.end.payload_sha256 == span.payload_sha256:
            self.duplicates += 1
        else:
            self.contradiction = "two different end records"

    @property
    def late(self) -> int:
        """Calls beyond N: they are no part of the attempt."""
        return 0 if self.end is None else sum(seq > self.end.record.n_calls for seq in self.calls)

    def verdict(self) -> tuple[State, str]:
        """The state, and why it is not complete (empty when it is). `contradictory` can never become complete."""
        if self.contradiction is not None:
            return "contradictory", self.contradiction
        if self.end is None:
            return "open", "no end record"
        missing = [seq for seq in range(1, self.end.record.n_calls + 1) if seq not in self.calls]
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            return "incomplete", f"{len(missing)} of {self.end.record.n_calls} calls are missing: {shown}"
        problem = self._problem(self.end)
        return ("contradictory", problem) if problem else ("complete", "")

    def _problem(self, end: EndSpan) -> str:
        epochs = {span.epoch for span in self.calls.values()} | {end.epoch}
        if len(epochs) > 1:
            return f"spans of several epochs: {', '.join(sorted(epochs))}"
        hashes = [self.calls[seq].payload_sha256 for seq in range(1, end.record.n_calls + 1)]
        return "" if digest(hashes) == end.record.digest else "the digest of the end record is not that of the calls"
