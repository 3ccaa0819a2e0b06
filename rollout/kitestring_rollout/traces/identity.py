"""Ids of spans, derived from the attempt so that anyone who knows it can name them."""

from __future__ import annotations

import hashlib
from uuid import UUID


def trace_id(attempt: str) -> bytes:
    """The 16 bytes of the attempt's UUID; raises ValueError when it is none."""
    return UUID(attempt).bytes


def root_span_id(attempt: str) -> bytes:
    """Span id of the attempt's root span, which the end record is. 8 bytes."""
    return hashlib.sha256(b"root:" + trace_id(attempt)).digest()[:8]


def call_span_id(attempt: str, epoch: str, seq: int) -> bytes:
    """Span id of call `seq`: the same for every copy of it. 8 bytes."""
    return hashlib.sha256(f"call:{attempt}:{epoch}:{seq}".encode()).digest()[:8]


def traceparent(attempt: str) -> str:
    """W3C trace context that puts an agent's own spans below the attempt's root span."""
    return f"00-{trace_id(attempt).hex()}-{root_span_id(attempt).hex()}-01"
