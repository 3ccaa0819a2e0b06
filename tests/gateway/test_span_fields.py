"""The count of what a request of spans holds: exact for what is sound, and never confused by what is not."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kitestring_rollout.gateway.span_fields import MalformedRequest, count_fields
from kitestring_rollout.traces.wire import field

MANY = 1 << 40


def request(text: str = "text") -> ExportTraceServiceRequest:
    sent = ExportTraceServiceRequest()
    resource = sent.resource_spans.add(schema_url="u")
    resource.resource.attributes.add(key="a").value.int_value = 1
    scope = resource.scope_spans.add()
    scope.scope.name = "s"
    span = scope.spans.add(name="n", trace_id=b"t" * 16, start_time_unix_nano=1, flags=1, kind=3)
    span.attributes.add(key="k").value.string_value = text
    span.events.add(name="e", time_unix_nano=1 << 60).attributes.add(key="b")
    span.links.add(trace_id=b"l" * 16)
    values = span.attributes.add(key="list").value.array_value.values
    for number in range(40):
        values.add().int_value = number
    return sent


def test_fields_are_counted_through_all_messages() -> None:
    request_, resource, attribute, scope_spans, scope = 1, 3, 1, 2, 1
    span, small, event, link = 9, 0, 3, 1
    values = 2 + 1 + 40 + 40  # key and value, the array, its values, the number in each
    expected = request_ + resource + attribute + scope_spans + scope + span + small + event + link + values
    assert count_fields(request().SerializeToString(), MANY) == expected
    assert count_fields(request("x" * 100).SerializeToString(), MANY) == expected + 3
    assert count_fields(b"", MANY) == 0


def test_it_stops_at_the_most_that_is_taken() -> None:
    assert count_fields(b"\x0a\0" * 1000 + b"\xff", 10) == 11


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\x0a\x05ab",
        b"\x0b",
        b"\x0a" + b"\xff" * 11,
        b"\x09123",
        b"\x0d12",
        field(b"\x0a", b"\x12\x05a") + field(b"\x0a", b"long enough"),
    ],
)
def test_what_is_no_message_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(MalformedRequest):
        count_fields(data, MANY)


@given(st.data())
def test_what_protobuf_reads_is_counted_and_all_else_is_malformed(data: st.DataObject) -> None:
    sent = bytearray(request().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        count = count_fields(bytes(sent), MANY)
    except MalformedRequest:
        return
    assert count <= len(sent)
    try:
        parsed = ExportTraceServiceRequest.FromString(bytes(sent))
    except DecodeError:
        return
    spans = [span for part in parsed.resource_spans for scope in part.scope_spans for span in scope.spans]
    assert count >= sum(1 + len(span.attributes) + len(span.events) + len(span.links) for span in spans)
