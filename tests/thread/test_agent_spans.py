"""Spans that an agent sends itself: stored apart, under the identity that its token says."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kitestring_api.names import PREFIX_AGENT, PREFIX_TRACES
from tests.thread.stack import GROUP_SIZE, Thread

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def requests(thread: Thread, prefix: str) -> list[ExportTraceServiceRequest]:
    store = thread.run.store()
    return [ExportTraceServiceRequest.FromString(store.get(info.key)) for info in store.list(prefix)]


def attributes(holder: Any) -> dict[str, Any]:
    found = {}
    for attribute in holder.attributes:
        assert attribute.key not in found, attribute.key
        found[attribute.key] = getattr(attribute.value, attribute.value.WhichOneof("value"))
    return found


def test_spans_are_stored_below_agent_with_the_identity_of_the_token(thread: Thread) -> None:
    agents = {seen["attempt"]: seen for seen in thread.of("spans")}
    assert all(seen["flushed"] for seen in agents.values())
    found = {}
    for request in requests(thread, PREFIX_AGENT):
        assert b"forged" not in request.SerializeToString()
        (resource,) = request.resource_spans
        (scope,) = resource.scope_spans
        (span,) = scope.spans
        identity = attributes(resource.resource)
        seen = agents[identity["kitestring.attempt"]]
        found[seen["attempt"]] = span
        row = next(row for row in thread.rows if row["attempt"] == seen["attempt"])
        for name in ("run", "rollout", "group", "task", "step"):
            assert identity[f"kitestring.{name}"] == row[name]
        assert identity["kitestring.mode"] == "train" and "kitestring.reward" not in identity
        assert (identity["team"], identity["service.name"]) == ("red", "agent")
        assert attributes(span) == {"tool": "calculator"}
        assert [attributes(event) for event in span.events] == [{"rows": 3}]
        assert attributes(scope.scope) == {}
    assert found.keys() == agents.keys() and len(found) == GROUP_SIZE


def test_they_are_children_of_the_attempt(thread: Thread) -> None:
    for request in requests(thread, PREFIX_AGENT):
        (span,) = request.resource_spans[0].scope_spans[0].spans
        identity = attributes(request.resource_spans[0].resource)
        assert span.trace_id == UUID(identity["kitestring.attempt"]).bytes
        roots = [s.span_id for s in gateway_spans(thread) if s.trace_id == span.trace_id and not s.parent_span_id]
        assert roots == [span.parent_span_id]


def test_nothing_of_them_is_below_traces(thread: Thread) -> None:
    for request in requests(thread, PREFIX_TRACES):
        raw = request.SerializeToString()
        assert b"look up" not in raw and b"forged" not in raw
        for resource in request.resource_spans:
            assert attributes(resource.resource)["service.name"] == "kitestring-gateway"
    assert len(gateway_spans(thread)) > len(thread.evidence)


def gateway_spans(thread: Thread) -> list[Any]:
    return [
        span
        for request in requests(thread, PREFIX_TRACES)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
