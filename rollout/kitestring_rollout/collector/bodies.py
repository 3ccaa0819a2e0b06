"""From the bytes of a request to the bytes of an object, or the reason why it is none. Pure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_GZIP = 31
"""zlib's wbits for a gzip member of any window."""


class BodyTooLarge(ValueError):
    """More bytes than a request may have."""


class BodyUnreadable(ValueError):
    """Not what the headers say it is."""


@dataclass(frozen=True, slots=True)
class Received:
    """A request that can be stored."""

    data: bytes
    """The serialised `ExportTraceServiceRequest` as it was sent, after decompression."""
    spans: int


def read_request(body: bytes, encoding: str, limit: int) -> Received:
    """Decompress (`encoding` is "gzip" or "identity") and check; raises BodyTooLarge, BodyUnreadable."""
    data = _gunzip(body, limit) if encoding == "gzip" else body
    if len(data) > limit:
        raise BodyTooLarge(f"the request has more than {limit} bytes")
    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError as error:
        raise BodyUnreadable("the body is not an OTLP ExportTraceServiceRequest") from error
    spans = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    return Received(data, spans)


def _gunzip(body: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit
    while body:
        member = zlib.decompressobj(_GZIP)
        try:
            part = member.decompress(body, left + 1)
        except zlib.error as error:
            raise BodyUnreadable(f"the body is not gzip: {error}") from error
        if len(part) > left:
            raise BodyTooLarge(f"the request has more than {limit} bytes after decompression")
        if not member.eof:
            raise BodyUnreadable("the body is cut short")
        parts.append(part)
        left -= len(part)
        body = member.unused_data
    return b"".join(parts)
