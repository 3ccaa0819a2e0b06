"""OTLP export requests made of serialised spans, without serialising them again."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from kitestring_rollout.traces.conventions import SCHEMA_URL, SCOPE_NAME, SERVICE_NAME
from kitestring_rollout.traces.wire import field

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
    scope = field(_SCOPE, InstrumentationScope(name=SCOPE_NAME).SerializeToString())
    scope_spans = scope + b"".join([field(_SPAN, span) for span in spans])
    resource_spans = b"".join(
        (
            field(_RESOURCE, described.SerializeToString()),
            field(_SCOPE_SPANS, scope_spans),
            field(_SCHEMA_URL, SCHEMA_URL.encode()),
        )
    )
    return field(_REQUEST_RESOURCE_SPANS, resource_spans)
