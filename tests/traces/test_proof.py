"""Completeness: never claimed falsely, whatever happens to spans; always proven when nothing happens to them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kitestring_rollout.traces.decoder import decode_calls
from kitestring_rollout.traces.encoder import CallEncoder, EncodedSpan, encode_end
from kitestring_rollout.traces.objects import ObjectUnreadable, scan
from kitestring_rollout.traces.proof import AttemptSpans, CallSpan, State
from kitestring_rollout.traces.reader import proven
from kitestring_rollout.traces.records import CallRecord
from kitestring_rollout.traces.requests import export_request
from tests.traces.rollouts import EPOCH, attempts, call, encoded, end, identity, plain


def collected(objects: list[list[bytes]]) -> dict[bytes, AttemptSpans]:
    """The spans of every attempt after these objects were read."""
    found: dict[bytes, AttemptSpans] = {}
    for spans in objects:
        try:
            scanned = scan(export_request(spans, {}), lambda _: True, contents=True)
        except ObjectUnreadable:
            continue
        for trace, span in scanned.spans:
            attempt = found.setdefault(trace, AttemptSpans(trace.hex()))
            if isinstance(span, CallSpan):
                attempt.add_call(span)
            else:
                attempt.add_end(span)
    return found


def state(spans: list[EncodedSpan]) -> State:
    (attempt,) = collected([[span.data for span in spans]]).values()
    return attempt.verdict()[0]


@settings(max_examples=60, deadline=None)
@given(attempts(), st.randoms())
def test_without_faults_every_attempt_is_complete(calls: list[CallRecord], shuffle: random.Random) -> None:
    spans = [span.data for span in encoded(calls, identity())]
    spans += shuffle.sample(spans, shuffle.randint(0, len(spans)))  # retries
    shuffle.shuffle(spans)
    cut = shuffle.randint(0, len(spans))
    (attempt,) = collected([spans[:cut], spans[cut:]]).values()
    assert attempt.verdict() == ("complete", "")
    assert [plain(record)["seq"] for record in proven(attempt).calls()] == list(range(1, len(calls) + 1))


def _written(count: int) -> tuple[list[CallRecord], list[bytes]]:
    """Calls of one conversation, the first two at the same time, and their spans."""
    calls = [
        call(
            seq,
            prompt_token_ids=np.arange(10 + 5 * seq, dtype=np.int32),
            messages=tuple({"role": "user", "content": f"say {number}"} for number in range(seq)),
        )
        for seq in [*range(2, 0, -1), *range(3, count + 1)][-count:]
    ]
    return calls, [span.data for span in encoded(calls, identity())]


WRITTEN = [_written(2), _written(3), _written(5)]


def flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_with_faults_what_is_complete_is_what_was_written(data: st.DataObject) -> None:
    calls, spans = data.draw(st.sampled_from(WRITTEN))
    spans = list(spans)
    for _ in range(data.draw(st.integers(1, 3))):
        fault = data.draw(st.sampled_from(["drop", "flip", "cut", "copy", "attribute"]))
        if not spans:
            break
        at = data.draw(st.integers(0, len(spans) - 1))
        if fault == "drop":
            del spans[at]
        elif fault == "copy":
            spans.append(spans[at])
        elif fault == "flip":
            spans[at] = flip(spans[at], data.draw(st.integers(0, len(spans[at]) - 1)), data.draw(st.integers(0, 7)))
        elif fault == "cut":
            spans[at] = spans[at][: data.draw(st.integers(0, len(spans[at]) - 1))]
        else:
            spans[at] = _with_other_proof(
                spans[at], data.draw(st.integers(0, 4)), data.draw(st.sampled_from("0123456789ace"))
            )
        spans = [span for span in spans if span]
    for attempt in collected([spans]).values():
        if attempt.verdict()[0] == "complete":
            _is_what_was_written(attempt, calls)


def _with_other_proof(data: bytes, field: int, value: str) -> bytes:
    try:
        span = Span.FromString(data)
    except DecodeError:  # an earlier fault
        return data
    if span.attributes:
        parts = span.attributes[0].value.string_value.split(":")
        parts[field % len(parts)] = value
        span.attributes[0].value.string_value = ":".join(parts)
    changed: bytes = span.SerializeToString()
    return changed


def _is_what_was_written(attempt: AttemptSpans, calls: list[CallRecord]) -> None:
    """All that training reads; contents may be damaged, which decoding them would say."""
    spans = [span._replace(contents=None) for span in proven(attempt).spans]
    for read, written in zip(decode_calls(spans), sorted(calls, key=lambda record: record.seq), strict=True):
        choices = tuple(dataclasses.replace(choice, message=None, text=None) for choice in written.choices)
        assert plain(read) == plain(dataclasses.replace(written, messages=(), tools=None, choices=choices))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.data())
@example(1, None)
def test_an_attempt_cut_off_before_its_end_is_never_complete(count: int, data: Any) -> None:
    """The gateway died: any part of the calls may have been exported, the end record never was."""
    spans = encoded([call(seq) for seq in range(1, count + 1)], identity())[:-1]
    kept = spans if data is None else [span for span in spans if data.draw(st.booleans())]
    if kept:
        assert state(kept) == "open"


def test_a_restarted_gateway_cannot_complete_what_another_began() -> None:
    first, second = identity(), identity(epoch="f" * 16)
    begun = CallEncoder(first)
    early = begun.encode(call(1, identity=first))
    late = CallEncoder(second).encode(call(2, identity=second))
    hashes = [early.payload_sha256, late.payload_sha256]
    for owner in (first, second):
        assert state([early, late, encode_end(end(2, hashes, owner))]) == "contradictory"


def test_calls_beyond_n_are_counted_and_are_no_part_of_it() -> None:
    encoder = CallEncoder(identity())
    spans = [encoder.encode(call(seq)) for seq in range(1, 4)]
    ended = encode_end(end(2, [span.payload_sha256 for span in spans[:2]]))
    (attempt,) = collected([[span.data for span in [*spans, ended]]]).values()
    assert attempt.verdict()[0] == "complete"
    assert attempt.late == 1
    assert [record.seq for record in proven(attempt).calls()] == [1, 2]


def test_an_attempt_without_calls_is_complete() -> None:
    assert state([encode_end(end(0, []))]) == "complete"


def test_two_different_spans_of_one_call_are_a_contradiction() -> None:
    spans = encoded([call(1)], identity())
    other = CallEncoder(identity()).encode(call(1, response_id="another"))
    for order in ([*spans, other], [other, *spans]):
        assert state(order) == "contradictory"


def test_two_different_end_records_are_a_contradiction() -> None:
    spans = encoded([call(1)], identity())
    other = encode_end(end(1, [spans[0].payload_sha256], reward=0.0))
    assert state([*spans, other]) == "contradictory"


def test_a_span_moved_to_another_number_or_attempt_proves_nothing() -> None:
    spans = encoded([call(1), call(2)], identity())
    moved = Span.FromString(spans[0].data)
    moved.attributes[0].value.string_value = moved.attributes[0].value.string_value.replace(
        f"{EPOCH}:1:", f"{EPOCH}:2:"
    )
    elsewhere = Span.FromString(spans[0].data)
    elsewhere.trace_id = b"t" * 16
    data = export_request([moved.SerializeToString(), elsewhere.SerializeToString()], {})
    scanned = scan(data, lambda _: True, contents=False)
    assert (scanned.spans, scanned.corrupt) == ([], 2)


@pytest.mark.parametrize("attributes", [0, 1])
def test_spans_of_others_are_counted_and_left_out(attributes: int) -> None:
    span = Span(trace_id=b"t" * 16, span_id=b"s" * 8, name="theirs")
    for number in range(attributes):
        span.attributes.add(key=f"a{number}").value.string_value = "1:c:x"
    scanned = scan(export_request([span.SerializeToString()], {}), lambda _: True, contents=True)
    assert (scanned.spans, scanned.foreign) == ([], 1)
