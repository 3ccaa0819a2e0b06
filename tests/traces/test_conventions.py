"""The table of conventions: true of the spans, true to OpenTelemetry's names, and printed in the documentation."""

from __future__ import annotations

import importlib
from pathlib import Path

from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kitestring_rollout.traces.conventions import ATTRIBUTES, EVALUATION_EVENT, INPUT_MESSAGES, OUTPUT_MESSAGES
from kitestring_rollout.traces.encoder import CallEncoder, encode_end
from kitestring_rollout.traces.identity import root_span_id, traceparent
from tests.traces.rollouts import call, encoded, end, identity, int32

DOCUMENT = Path(__file__).parents[2] / "docs" / "traces.md"
TYPES = {
    "string": "string_value",
    "JSON string": "string_value",
    "string[]": "array_value",
    "int": "int_value",
    "double": "double_value",
    "boolean": "bool_value",
}


def all_kinds_of_spans() -> list[Span]:
    reply = call().choices[0]
    calls = [
        call(1, tools=({"type": "function", "function": {"name": "sum"}},), choices=(reply, reply), agent="solver"),
        call(2, streamed=True, first_chunk_unix_nano=call(2).started_unix_nano + 5, nonconforming=("top_p",)),
        call(3, outcome="failed", status=502, error="no server", choices=(), sampling={"seed": 3, "temperature": 0.5}),
        call(4, api="completions", outcome="cancelled", status=None, choices=(), prompt_token_ids=int32()),
    ]
    spans = encoded(calls, identity())
    spans.insert(2, CallEncoder(identity()).encode(call(5), contents_room=0))
    failed = encode_end(end(0, [], outcome="AgentFailed", reason="exit code 1", exit_code=1, reward=None))
    return [Span.FromString(span.data) for span in [*spans, failed]]


def test_spans_carry_what_the_table_says_and_all_of_it() -> None:
    rows = {row.name: row for row in ATTRIBUTES}
    assert len(rows) == len(ATTRIBUTES)
    seen = set()
    for span in all_kinds_of_spans():
        kind = "end" if not span.parent_span_id else "call"
        attributes = [(one, {"both", kind}) for one in span.attributes]
        attributes += [(one, {"event"}) for event in span.events for one in event.attributes]
        for attribute, on in attributes:
            row = rows[attribute.key]
            assert row.on in on, attribute.key
            assert attribute.value.WhichOneof("value") == TYPES[row.type], attribute.key
            seen.add(attribute.key)
        assert len({attribute.key for attribute in span.attributes}) == len(span.attributes)
    assert seen == set(rows)


def test_names_that_are_not_ours_are_opentelemetrys() -> None:
    known: set[str] = set()
    for module in (
        "_incubating.attributes.gen_ai_attributes",
        "_incubating.attributes.process_attributes",
        "attributes.error_attributes",
        "attributes.http_attributes",
    ):
        constants = vars(importlib.import_module(f"opentelemetry.semconv.{module}")).values()
        known.update(value for value in constants if isinstance(value, str))
    assert [row.name for row in ATTRIBUTES if row.source == "OpenTelemetry" and row.name not in known] == []


def test_a_viewer_sees_one_trace_below_one_root() -> None:
    *calls, root, _ = all_kinds_of_spans()
    assert {span.trace_id for span in [*calls, root]} == {root.trace_id}
    assert {span.parent_span_id for span in calls} == {root.span_id} == {root_span_id(identity().attempt)}
    assert len({span.span_id for span in [*calls, root]}) == len(calls) + 1
    assert not root.parent_span_id
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in calls)
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in calls)
    assert [span.name for span in calls] == ["chat policy"] * 4 + ["text_completion policy"]
    assert [span.status.code for span in calls] == [Status.STATUS_CODE_UNSET] * 3 + [Status.STATUS_CODE_ERROR] * 2
    assert [event.name for event in root.events] == [EVALUATION_EVENT]


def test_messages_can_be_read_in_the_span() -> None:
    first = {one.key: one.value.string_value for one in all_kinds_of_spans()[0].attributes}
    assert first[INPUT_MESSAGES].startswith('[{"role":"system","parts":[{"type":"text","content":"Be brief."}]}')
    assert '{"type":"text","content":"Answer: 4"}],"finish_reason":"stop"}' in first[OUTPUT_MESSAGES]


def test_traceparent_names_the_root_span() -> None:
    attempt = identity().attempt
    assert traceparent(attempt) == f"00-{attempt.replace('-', '')}-{root_span_id(attempt).hex()}-01"


def test_the_documentation_shows_the_table() -> None:
    lines = ["| attribute | on | type | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.on} | {row.type} | {row.meaning} |" for row in ATTRIBUTES]
    table = "\n".join(lines)
    assert table in DOCUMENT.read_text(), f"docs/traces.md must hold this table:\n\n{table}"
