"""Server-sent events wherever the network cuts them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.gateway.stream import EventParser, event

DATA = st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b""))
EVENTS = st.lists(DATA, max_size=8)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({min(place, len(stream)) for place in places})
    return [stream[start:end] for start, end in zip([0, *edges], [*edges, len(stream)], strict=True)]


def parse(chunks: list[bytes]) -> list[bytes]:
    parser = EventParser()
    found = [data for chunk in chunks for data in parser.feed(chunk)]
    return found + parser.finish()


@given(EVENTS, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans(), st.lists(st.integers(0, 300), max_size=12))
def test_chunk_boundaries_and_line_ends_do_not_matter(
    events: list[bytes], end: bytes, comments: bool, places: list[int]
) -> None:
    stream = b"".join((b": hb" + end if comments else b"") + b"data: " + data + end + end for data in events)
    assert parse(cut(stream, places)) == events


@given(st.lists(st.lists(DATA, min_size=1, max_size=3), max_size=5), st.lists(st.integers(0, 300), max_size=12))
def test_data_of_several_lines_is_joined(events: list[list[bytes]], places: list[int]) -> None:
    stream = b"".join(b"".join(b"data:" + b" " + line + b"\n" for line in lines) + b"\n" for lines in events)
    assert parse(cut(stream, places)) == [b"\n".join(lines) for lines in events]


@given(EVENTS, st.lists(st.integers(0, 300), max_size=12))
def test_other_fields_and_a_mark_of_order_are_passed_over(events: list[bytes], places: list[int]) -> None:
    stream = b"\xef\xbb\xbf" + b"".join(
        b"event: x\nid: 1\nretry: 2\nignored\ndata:" + b" " + d + b"\n\n" for d in events
    )
    assert parse(cut(stream, places)) == events


@given(EVENTS)
def test_what_is_written_is_read_again(events: list[bytes]) -> None:
    assert parse([event(data) for data in events]) == events
    assert parse([b"".join(event(data) for data in events)]) == events


def test_details_of_the_grammar() -> None:
    assert parse([b"data\n\n"]) == [b""]
    assert parse([b"data:no space\n\n"]) == [b"no space"]
    assert parse([b"data:  two spaces\n\n"]) == [b" two spaces"]
    assert parse([b"\n\n\ndata: a\n\n\n\ndata: b\n\n"]) == [b"a", b"b"]
    assert parse([b"data: unfinished"]) == [b"unfinished"]


def test_comments_are_counted() -> None:
    parser = EventParser()
    parser.feed(b": one\n\n:two\n\n")
    assert parser.comments == 2
