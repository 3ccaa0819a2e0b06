"""From the bytes of a trace object to the spans that prove attempts."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import zstandard
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kitestring_rollout.traces import conventions as names
from kitestring_rollout.traces.codec import PayloadCorrupt, payload_sha256
from kitestring_rollout.traces.decoder import decode_end
from kitestring_rollout.traces.encoder import PROOF_FORMAT
from kitestring_rollout.traces.proof import CallSpan, EndSpan

_MAX_BYTES = 1 << 30
_CONTENT_NAMES = frozenset((names.INPUT_MESSAGES, names.OUTPUT_MESSAGES, names.TOOL_DEFINITIONS))


class ObjectUnreadable(ValueError):
    """An object is no OTLP trace request."""


@dataclass(slots=True)
class Scanned:
    """What an object holds. Spans that prove nothing are only counted."""

    spans: list[tuple[bytes, CallSpan | EndSpan]] = field(default_factory=list)
    """With the trace id of each."""
    corrupt: int = 0
    """Spans of ours whose payload is not what its hash says."""
    foreign: int = 0
    """Spans that are not a gateway's."""


def scan(data: bytes, wanted: Callable[[bytes], bool], *, contents: bool) -> Scanned:
    """The spans of those trace ids that are wanted, each checked against its hash; raises `ObjectUnreadable`."""
    try:
        request = ExportTraceServiceRequest.FromString(_decompressed(data))
    except DecodeError as error:
        raise ObjectUnreadable("it is not an OTLP ExportTraceServiceRequest") from error
    scanned = Scanned()
    decided: dict[bytes, bool] = {}
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                trace = span.trace_id
                take = decided.get(trace)
                if take is None:
                    take = decided[trace] = len(trace) == 16 and wanted(trace)
                if take:
                    _scan_span(span, trace, contents, scanned)
    return scanned


def _scan_span(span: Span, trace: bytes, contents: bool, scanned: Scanned) -> None:
    attributes = span.attributes
    if len(attributes) < 2:
        scanned.foreign += 1
        return
    first, second = attributes[0], attributes[1]
    if first.key != names.PROOF or second.key != names.PAYLOAD:
        scanned.foreign += 1
        return
    parts = first.value.string_value.split(":")
    if len(parts) != 5 or parts[0] != PROOF_FORMAT:
        scanned.corrupt += 1
        return
    _, kind, epoch, number, claimed = parts
    payload = second.value.string_value
    try:
        seq = int(number)
        hashed = payload_sha256(kind, trace, epoch, seq, payload)
        if hashed.hex() != claimed:
            raise PayloadCorrupt("the payload is not what its hash says")
        if kind == "c" and seq > 0:
            texts = _contents(span) if contents else None
            scanned.spans.append((trace, CallSpan(epoch, seq, hashed, payload, texts)))
        elif kind == "e":
            scanned.spans.append((trace, EndSpan(epoch, hashed, decode_end(payload))))
        else:
            scanned.corrupt += 1
    except ValueError:  # PayloadCorrupt too: such a span proves nothing, as if it were not there
        scanned.corrupt += 1


def _contents(span: Span) -> dict[str, str]:
    return {one.key: one.value.string_value for one in span.attributes if one.key in _CONTENT_NAMES}


def _decompressed(data: bytes) -> bytes:
    """Collectors may be set to compress objects; the magic number says so, whatever the key's ending."""
    try:
        if data[:2] == b"\x1f\x8b":
            inflater = zlib.decompressobj(31)
            inflated = inflater.decompress(data, _MAX_BYTES)
            if not inflater.eof:
                raise ObjectUnreadable("its gzip is cut short, or larger than a GiB")
            return inflated
        if data[:4] == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor().stream_reader(data) as inflating:
                return inflating.read(_MAX_BYTES)
    except (zlib.error, zstandard.ZstdError) as error:
        raise ObjectUnreadable(f"it cannot be decompressed: {error}") from error
    return data
