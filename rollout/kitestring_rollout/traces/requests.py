"""OTLP export requests made of serialised spans, without serialising them again."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from kitestring_rollout.traces.conventions import SCHEMA_URL, SCOPE_NAME, SERVICE_NAME

# Field numbers of opentelemetry/proto/trace/v1/trace.proto; all are length-delimited.
_REQUEST_RESOURCE_SPANS = b"\x0a"  # 1
_RESOURCE = b"\x0a"  # 1
_SCOPE_SPANS = b"\x12"  # 2
_SCHEMA_URL = b"\x1a"  # 3
_SCOPE = b"\x0a"  # 1
_SPAN = b"\x12"  # 2


def export_request(spans: Iterable[bytes], resource: dict[str, str]) -> bytes:
    """A serialised `ExportTraceServiceRequest` of one resource, holding the serialised spans in order."""
    described = Resource()
    for key, value in {"service.name": SERVICE_NAME, **resource}.items():
        described.attributes.add(key=key).value.string_value = value
    scope = _field(_SCOPE, InstrumentationScope(name=SCOPE_NAME).SerializeToString())
    scope_spans = scope + b"".join([_field(_SPAN, span) for span in spans])
    resource_spans = b"".join(
        (
            _field(_RESOURCE, described.SerializeToString()),
            _field(_SCOPE_SPANS, scope_spans),
            _field(_SCHEMA_URL, SCHEMA_URL.encode()),
        )
    )
    return _field(_REQUEST_RESOURCE_SPANS, resource_spans)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
