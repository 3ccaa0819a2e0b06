"""Records to spans and back: bit for bit, and nothing unreadable is taken for a record."""

from __future__ import annotations

import base64
import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kitestring_rollout.traces import attributes, codec
from kitestring_rollout.traces.codec import PayloadCorrupt
from kitestring_rollout.traces.decoder import decode_calls, decode_end
from kitestring_rollout.traces.encoder import CallEncoder, EncodedSpan, encode_end
from kitestring_rollout.traces.objects import scan
from kitestring_rollout.traces.proof import CallSpan, EndSpan
from kitestring_rollout.traces.records import CallRecord, ChoiceRecord, VersionSpan
from kitestring_rollout.traces.requests import export_request
from tests.traces.rollouts import attempts, call, encoded, end, identity, int32, plain, texts


def read(spans: list[EncodedSpan], contents: bool = True) -> tuple[list[CallSpan], list[EndSpan]]:
    scanned = scan(export_request([span.data for span in spans], {}), lambda _: True, contents=contents)
    assert not scanned.corrupt
    assert not scanned.foreign
    found = [span for _, span in scanned.spans]
    return [span for span in found if isinstance(span, CallSpan)], [span for span in found if isinstance(span, EndSpan)]


def without_contents(record: CallRecord) -> CallRecord:
    choices = tuple(dataclasses.replace(choice, message=None, text=None) for choice in record.choices)
    return dataclasses.replace(record, messages=(), tools=None, choices=choices)


def decoded(spans: list[EncodedSpan], contents: bool = True) -> list[Any]:
    records = decode_calls(read(spans, contents)[0])
    return [plain(dataclasses.replace(record, messages_shared=0)) for record in records]


@settings(max_examples=50, deadline=None)
@given(attempts(), st.booleans(), st.booleans())
def test_calls_come_back_as_they_were(calls: list[CallRecord], recorded: bool, contents: bool) -> None:
    spans = encoded(calls, identity(), record_contents=recorded)
    wanted = sorted(calls, key=lambda record: record.seq)
    if not (recorded and contents):
        wanted = [without_contents(record) for record in wanted]
    assert decoded(spans, contents) == [plain(record) for record in wanted]


def test_an_end_record_comes_back_as_it_was() -> None:
    record = end(3, [b"x" * 32], outcome="TimedOut", reason="ran 60 s", reward=None, exit_code=-9)
    ((span,)) = read([encode_end(record)])[1]
    assert span.record == record


def test_without_contents_no_word_of_the_agent_is_written() -> None:
    secret = "hush-hush"
    record = call(
        messages=({"role": "user", "content": secret},),
        tools=({"type": "function", "function": {"name": secret}},),
        choices=(ChoiceRecord(0, int32(1), finish_reason="stop", message={"role": "assistant", "content": secret}),),
    )
    other = call(2, api="completions", choices=(ChoiceRecord(0, text=secret),))
    for spans in ([record, other], [other, record]):
        written = b"".join(span.data for span in encoded(spans, identity(), record_contents=False))
        ended = encode_end(end(1, [], output=secret), record_contents=False).data
        for data in (written, ended, *_payloads(written)):
            assert secret.encode() not in data


def _payloads(spans: bytes) -> list[bytes]:
    """Everything in the spans that is base64, decoded."""
    found = []
    for piece in spans.split(b"kitestring.payload")[1:]:
        start = piece.index(b"r") + 1
        run = piece[start:]
        size = next((at for at, byte in enumerate(run) if not (chr(byte).isalnum() or byte in b"+/=")), len(run))
        found.append(base64.b64decode(run[: size - size % 4]))
    assert found
    return found


def test_a_conversation_costs_what_is_new_in_it() -> None:
    rng = np.random.default_rng(0)
    prompt, calls = rng.integers(0, 150_000, 2000, dtype=np.int32), []
    messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": "x" * 5000},)
    for seq in range(1, 21):
        reply = rng.integers(0, 150_000, 50, dtype=np.int32)
        calls.append(call(seq, prompt_token_ids=prompt, choices=(ChoiceRecord(0, reply),), messages=messages))
        prompt = np.concatenate([prompt, reply, rng.integers(0, 150_000, 30, dtype=np.int32)])
        messages = (*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": f"and {seq}?"})
    sizes = [len(span.data) for span in encoded(calls, identity())]
    assert sizes[0] > 5000 + 2000 * 4 / 2
    assert max(sizes[1:20]) < 3500


def test_interleaved_conversations_are_told_apart() -> None:
    calls, conversations = [], [list(range(agent * 1000, agent * 1000 + 900)) for agent in range(4)]
    for seq in range(1, 17):
        ids = conversations[seq % 4]
        ids.append(seq)
        calls.append(
            call(seq, prompt_token_ids=int32(*ids), choices=(), messages=({"role": "user", "content": str(seq % 4)},))
        )
    spans = encoded(calls, identity())
    heads = [codec.unpack(span.payload)[0]["prompt"] for span in read(spans)[0]]
    assert [head["base"] for head in heads] == [0] * 4 + list(range(1, 13))
    assert [head["count"] - head["shared"] for head in heads[4:]] == [1] * 12


def test_decoding_a_long_conversation_is_not_recursive() -> None:
    calls = [call(seq, prompt_token_ids=np.arange(seq + 1, dtype=np.int32), choices=()) for seq in range(1, 1200)]
    assert len(decoded(encoded(calls, identity()))) == 1199


def test_a_record_that_contradicts_itself_is_refused() -> None:
    encoder = CallEncoder(identity())
    one = ChoiceRecord(0, int32(1, 2), np.zeros(1, dtype=np.float32))
    gap = ChoiceRecord(0, int32(1, 2), versions=(VersionSpan("1.0", 1, 2),))
    short = ChoiceRecord(0, int32(1, 2), versions=(VersionSpan("1.0", 0, 1),))
    for choice, said in ((one, "2 token ids but 1 logprobs"), (gap, "gap at token 0"), (short, "cover 1 of 2")):
        with pytest.raises(ValueError, match=said):
            encoder.encode(call(choices=(choice,)))
    with pytest.raises(ValueError, match="belongs to attempt"):
        encoder.encode(call(identity=identity(2)))


def talk(seq: int, size: int = 1) -> CallRecord:
    """Call `seq` of a conversation that begins with `size` characters."""
    said = [{"role": "user", "content": "x" * size}, *({"role": "user", "content": str(at)} for at in range(seq))]
    return call(seq, messages=tuple(said), prompt_token_ids=np.arange(10 * seq, dtype=np.int32), tools=({"name": "t"},))


def test_contents_without_room_are_left_out_and_nothing_refers_to_them() -> None:
    encoder = CallEncoder(identity())
    calls = [talk(seq, 5000) for seq in range(1, 4)]
    spans = [encoder.encode(record, room) for record, room in zip(calls, (4000, 9000, 9000), strict=True)]
    assert len(spans[0].data) < 2500 and b"kitestring.contents.omitted" in spans[0].data
    assert len(spans[1].data) > 5000 and len(spans[2].data) < 3500
    first, *others = decoded(spans)
    assert first == plain(without_contents(calls[0]))
    assert others == [plain(record) for record in calls[1:]]


def test_the_contents_of_an_attempt_are_bounded() -> None:
    encoder = CallEncoder(identity(), max_contents_bytes=20_000)
    sizes = [len(encoder.encode(call(seq, messages=({"content": "x" * 6000},))).data) for seq in range(1, 9)]
    assert [size > 6000 for size in sizes] == [True] + [False] * 7
    encoder = CallEncoder(identity(), max_contents_bytes=20_000)
    sizes = [len(encoder.encode(call(seq, messages=({"content": f"{seq}" * 6000},))).data) for seq in range(1, 9)]
    assert [size > 6000 for size in sizes] == [True] * 3 + [False] * 5


def test_an_encoder_keeps_little_of_what_an_agent_sent() -> None:
    encoder = CallEncoder(identity())
    tracemalloc.start()
    try:
        for seq in range(1, 7):
            many = {"role": "user", "content": f"{seq}", "keys": {f"{seq}-{at}": at for at in range(50_000)}}
            record = call(seq, messages=(many,), tools=(many,), prompt_token_ids=int32(seq), memory_bytes=8 << 20)
            encoder.encode(record)
            few = [{"role": "user", "content": f"{seq} {at}"} for at in range(20_000)]
            encoder.encode(call(seq + 6, messages=tuple(few), prompt_token_ids=int32(99 + seq), memory_bytes=5 << 20))
        del many, few, record
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("size", "count"), [(300_000, 4), (20, 5000)])
def test_long_conversations_are_told_by_hashes_and_come_back_whole(size: int, count: int) -> None:
    said: list[Any] = [{"role": "user", "content": f"{at}" * size} for at in range(count)]
    calls = []
    for seq in range(1, 4):
        said = [*said, {"role": "user", "content": f"and {seq}"}]
        calls.append(call(seq, messages=tuple(said), tools=({"name": "t"},), memory_bytes=8 << 20))
    calls.append(call(4, messages=(said[0], {**said[1], "content": "other"}, *said[2:]), memory_bytes=8 << 20))
    spans = encoded(calls, identity())
    assert decoded(spans) == [plain(dataclasses.replace(record, memory_bytes=0)) for record in calls]
    ratios = [len(span.data) / len(spans[0].data) for span in spans[1:4]]
    assert max(ratios[:2]) < 0.2 and ratios[2] > 0.4


def test_a_span_without_its_contents_proves_the_same() -> None:
    calls = [talk(seq) for seq in range(1, 4)]
    spans = encoded(calls, identity())[:3]
    spans[1] = spans[1].without_contents()
    assert b"gen_ai.input" not in spans[1].data and b"kitestring.contents.omitted" in spans[1].data
    assert [span.payload_sha256 for span in read(spans)[0]] == [span.payload_sha256 for span in spans]
    first, second, third = decoded(spans)
    assert first == plain(calls[0])
    assert second == plain(without_contents(calls[1]))
    # What it adds to the second call's messages is no conversation without them.
    assert third == plain(dataclasses.replace(calls[2], messages=(), tools=None))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_payload_that_is_not_one_is_refused(data: st.DataObject) -> None:
    head = {"a": 1}
    good = codec.pack(head, [b"\0\0\0\0" * data.draw(st.sampled_from([1, 1000]))])
    bad = data.draw(
        st.text(max_size=20)
        | st.binary(max_size=50).map(lambda raw: "r" + base64.b64encode(raw).decode())
        | st.binary(max_size=50).map(lambda raw: "z" + base64.b64encode(raw).decode())
        | st.integers(0, len(good) - 1).map(lambda size: good[:size])
    )
    for decode in (decode_end, lambda text: decode_calls([CallSpan("e", 1, b"", text, None)])):
        with pytest.raises(PayloadCorrupt):
            decode(bad)


def test_altered_contents_are_noticed() -> None:
    ((span,)) = read(encoded([call()], identity()))[0]
    assert span.contents is not None
    contents = {name: text.replace("2+1", "2+9") for name, text in span.contents.items()}
    assert contents != span.contents
    with pytest.raises(PayloadCorrupt, match="contents of call 1"):
        decode_calls([span._replace(contents=contents)])
    stripped = {name: text for name, text in span.contents.items() if "input" not in name}
    (record,) = decode_calls([span._replace(contents=stripped)])
    assert record.messages == ()


def test_numbers_that_no_attribute_can_hold() -> None:
    record = call(sampling={"seed": 2**64 - 1, "max_tokens": True, "temperature": 1})
    (back,) = decode_calls(read(encoded([record], identity()))[0])
    assert back.sampling == record.sampling


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_shared_ids(first: list[int], second: list[int]) -> None:
    expected = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert codec.shared_ids(int32(*first).tobytes(), int32(*second).tobytes()) == expected


@given(attempts(), st.booleans())
def test_spans_are_written_as_protobuf_writes_them(calls: list[CallRecord], contents: bool) -> None:
    for span in encoded(calls, identity(), record_contents=contents):
        assert Span.FromString(span.data).SerializeToString() == span.data


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.lists(texts))
def test_attributes_hold_any_number_and_text(number: int, real: float, many: list[str]) -> None:
    one, two, three, four = Span.FromString(
        attributes.number("n", number)
        + attributes.real("r", real)
        + attributes.texts("t", many)
        + attributes.flag("f", False)
    ).attributes
    assert (one.key, one.value.int_value) == ("n", number)
    assert (two.key, repr(two.value.double_value)) == ("r", repr(real))
    assert (three.key, [value.string_value for value in three.value.array_value.values]) == ("t", many)
    assert (four.key, four.value.WhichOneof("value"), four.value.bool_value) == ("f", "bool_value", False)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 1 << 21])
def test_a_text_of_any_length_is_an_attribute(size: int) -> None:
    (found,) = Span.FromString(attributes.text("name", "x" * size)).attributes
    assert found.value.string_value == "x" * size
