"""The reader: finds what is new, decides attempts, and forgets them."""

from __future__ import annotations

import gc
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from kitestring_rollout.storage import DirectoryStore, ObjectInfo, ObjectMissing, StoreUnavailable
from kitestring_rollout.traces.attempts import LostAttempt, ProvenAttempt
from kitestring_rollout.traces.object_keys import first_key, key_time, new_key, unix_seconds_of
from kitestring_rollout.traces.reader import TraceReader, read_attempts
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord
from kitestring_rollout.traces.requests import export_request
from tests.traces.rollouts import call, encoded, identity, plain

T0 = 1_760_000_000.0
"""When the attempts of `identity` begin."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Traces:
    """A store with objects at chosen times."""

    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)
        self._count = 0

    def put(self, spans: list[bytes], at: float = T0 + 1, suffix: str = ".binpb") -> str:
        self._count += 1
        return self.put_raw(export_request(spans, {}), at, suffix)

    def put_raw(self, data: bytes, at: float = T0 + 1, suffix: str = ".binpb") -> str:
        self._count += 1
        key = f"{first_key('traces/', at)}-7000-8000-{self._count:012x}{suffix}"
        assert key_time(key) == pytest.approx(at, abs=0.001)
        self.store.put(key, data)
        return key


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    return Traces(tmp_path / "store")


def conversation(of: AttemptIdentity, count: int = 3) -> list[CallRecord]:
    return [call(seq, identity=of) for seq in range(1, count + 1)]


def spans_of(number: int = 1, count: int = 3) -> list[bytes]:
    of = identity(number)
    return [span.data for span in encoded(conversation(of, count), of)]


def states(decided: Iterator[ProvenAttempt | LostAttempt]) -> dict[str, str]:
    return {one.attempt: "complete" if isinstance(one, ProvenAttempt) else one.reason for one in decided}


def attempt(number: int = 1) -> str:
    return identity(number).attempt


def test_an_attempt_is_given_once_when_it_is_complete(traces: Traces) -> None:
    reader, spans = TraceReader(traces.store), spans_of()
    traces.put(spans[:2])
    assert states(reader.poll()) == {}
    traces.put(spans[2:])
    (proven,) = reader.poll()
    assert isinstance(proven, ProvenAttempt)
    assert (proven.attempt, proven.end.n_calls, proven.end.reward) == (attempt(), 3, 1.0)
    assert [record.seq for record in proven.calls()] == [1, 2, 3]
    assert states(reader.poll()) == {}
    traces.put(spans)  # a retry that came late
    assert states(reader.poll()) == {}
    assert reader.open_attempts == 0


def test_attempts_share_objects(traces: Traces) -> None:
    reader = TraceReader(traces.store)
    mixed = [span for pair in zip(spans_of(1), spans_of(2), strict=True) for span in pair]
    traces.put(mixed[:5])
    traces.put(mixed[5:])
    assert states(reader.poll()) == {attempt(1): "complete", attempt(2): "complete"}


def test_contents_only_where_asked_for(traces: Traces) -> None:
    traces.put(spans_of())
    (without,), (whole,) = TraceReader(traces.store).poll(), read_attempts(traces.store)
    assert [record.messages for record in without.calls()] == [()] * 3
    written = conversation(identity())
    assert [plain(record.messages) for record in whole.calls()] == [plain(record.messages) for record in written]


def test_an_object_that_appears_late_is_found(traces: Traces) -> None:
    """Its key was made before keys that were listed already: a slow write, or another collector's clock."""
    clock = Clock()
    reader, spans = TraceReader(traces.store, clock=clock), spans_of()
    traces.put(spans[:2], at=T0 + 50)
    assert states(reader.poll()) == {}
    traces.put(spans[2:], at=T0 + 1)
    clock.now += 11
    assert states(reader.poll()) == {attempt(): "complete"}


def test_an_attempt_that_stays_incomplete_is_lost_after_the_grace(traces: Traces) -> None:
    clock = Clock()
    reader, spans = TraceReader(traces.store, grace_seconds=30, clock=clock), spans_of()
    traces.put([spans[0], spans[2], spans[3]])
    assert states(reader.poll()) == {}
    clock.now += 29
    assert states(reader.poll()) == {}
    clock.now += 2
    (lost,) = reader.poll()
    assert isinstance(lost, LostAttempt)
    assert lost.reason == "1 of 3 calls are missing: 2"
    assert lost.end is not None
    assert [span.seq for span in lost.spans] == [1, 3]
    traces.put([spans[1]])
    assert states(reader.poll()) == {}
    assert reader.counts.lost == 1


def test_before_an_attempt_is_lost_the_reader_looks_once_more(traces: Traces) -> None:
    """Far behind: the object's key is older than any overlap."""
    clock = Clock()
    reader, spans = TraceReader(traces.store, overlap_seconds=60, clock=clock), spans_of()
    traces.put(spans[1:], at=T0 + 500)
    assert states(reader.poll()) == {}
    traces.put(spans[:1], at=T0 + 1)
    clock.now += 11
    assert states(reader.poll()) == {}
    clock.now += 30
    assert states(reader.poll()) == {attempt(): "complete"}


def test_an_attempt_without_end_record_is_not_given_and_can_be_released(traces: Traces) -> None:
    clock = Clock()
    reader, spans = TraceReader(traces.store, clock=clock), spans_of()
    traces.put(spans[:2])
    clock.now += 10_000
    assert states(reader.poll()) == {}
    assert states(reader.undecided()) == {attempt(): "no end record"}
    reader.release(attempt())
    assert reader.open_attempts == 0
    traces.put(spans)
    assert states(reader.poll()) == {}
    assert reader.open_attempts == 0


def test_a_contradiction_is_lost_at_once(traces: Traces) -> None:
    spans = spans_of()
    other = encoded([call(1, response_id="another")], identity())[0].data
    traces.put([*spans[1:], other])
    assert states(TraceReader(traces.store).poll()) == {
        attempt(): "the digest of the end record is not that of the calls"
    }


def test_objects_that_cannot_be_read_are_counted_and_left_out(traces: Traces) -> None:
    traces.put_raw(b"not protobuf")
    traces.put_raw(b"\x1f\x8bnot gzip")
    traces.put_raw(gzip.compress(b"cut short" * 100)[:-20])
    traces.put_raw(b"\x28\xb5\x2f\xfdnot zstd")
    traces.store.put("traces/readme", b"whatever")
    traces.put(spans_of(), at=T0 + 2)
    reader = TraceReader(traces.store)
    assert states(reader.poll()) == {attempt(): "complete"}
    assert (reader.counts.unreadable_objects, reader.counts.objects) == (5, 6)
    assert states(reader.poll()) == {}
    assert reader.counts.objects == 6


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_objects_are_read(traces: Traces, compress: object) -> None:
    traces.put_raw(compress(export_request(spans_of(), {})), suffix=".binpb.gz")  # type: ignore[operator]
    assert states(TraceReader(traces.store).poll()) == {attempt(): "complete"}


def test_a_store_that_goes_away_is_read_on_where_it_stopped(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        traces.put(spans_of(number), at=T0 + number)
    reader, get, gone = TraceReader(traces.store), traces.store.get, {"after": 2}

    def unreliable(key: str) -> bytes:
        if key_time(key) == pytest.approx(T0 + 3, abs=0.01) and gone["after"]:
            raise StoreUnavailable("away")
        return get(key)

    monkeypatch.setattr(traces.store, "get", unreliable)
    found: dict[str, str] = {}
    with pytest.raises(StoreUnavailable):
        for decided in reader.poll():
            found[decided.attempt] = "complete"
    assert list(found) == [attempt(1), attempt(2)]
    gone["after"] = 0
    assert list(states(reader.poll())) == [attempt(3), attempt(4), attempt(5)]


def test_an_object_deleted_since_it_was_listed_is_no_error(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    traces.put(spans_of())

    def gone(key: str) -> bytes:
        raise ObjectMissing(key)

    monkeypatch.setattr(traces.store, "get", gone)
    assert states(TraceReader(traces.store).poll()) == {}


def test_a_reader_can_begin_late_in_a_run(traces: Traces) -> None:
    traces.put(spans_of(1), at=T0 + 1)
    traces.put(spans_of(2), at=T0 + 100)
    assert states(TraceReader(traces.store, since=T0 + 50).poll()) == {attempt(2): "complete"}


def test_an_ordinary_look_opens_only_new_objects(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, listed, got = Clock(), [], []
    listing, get = traces.store.list, traces.store.get

    def watched_list(prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        for info in listing(prefix, start_after):
            listed.append(info.key)
            yield info

    def watched_get(key: str) -> bytes:
        got.append(key)
        return get(key)

    monkeypatch.setattr(traces.store, "list", watched_list)
    monkeypatch.setattr(traces.store, "get", watched_get)
    reader = TraceReader(traces.store, clock=clock)
    for number in range(1, 101):
        traces.put(spans_of(number, 1), at=T0 + 2 * number)
        clock.now += 2
        assert states(reader.poll()) == {attempt(number): "complete"}
    assert len(got) == 100
    assert len(listed) < 100 * 3 + 20 * 35


def test_memory_follows_the_attempts_in_progress(traces: Traces) -> None:
    clock = Clock()
    reader = TraceReader(traces.store, clock=clock)
    for number in range(1, 40):
        traces.put(spans_of(number, 2), at=T0 + 100 * number)
        for decided in reader.poll():
            decided.calls()
            del decided
    gc.collect()
    assert reader.open_attempts == 0
    assert len(reader._seen) < 25


def test_read_attempts_gives_those_named_and_says_what_is_wrong(traces: Traces) -> None:
    for number in range(1, 4):
        traces.put(spans_of(number))
    traces.put(spans_of(4)[:2])
    assert states(read_attempts(traces.store, [attempt(2)])) == {attempt(2): "complete"}
    assert states(read_attempts(traces.store, [attempt(1), attempt(4), attempt(9)])) == {
        attempt(1): "complete",
        attempt(4): "no end record",
    }
    (lost,) = (one for one in read_attempts(traces.store) if one.attempt == attempt(4))
    assert [record.seq for record in lost.calls()] == [1, 2]


def test_calls_of_a_lost_attempt_that_need_a_missing_one_are_left_out(traces: Traces) -> None:
    spans = spans_of()
    traces.put(spans[1:])
    (lost,) = read_attempts(traces.store)
    assert isinstance(lost, LostAttempt)
    assert [record.seq for record in lost.calls()] == []


def test_keys_are_in_the_order_of_time() -> None:
    keys = [new_key("traces/") for _ in range(2000)]
    assert keys == sorted(set(keys))
    moment = key_time(keys[0])
    assert moment is not None
    assert first_key("traces/", moment) <= keys[0] < first_key("traces/", moment + 1)
    assert (
        first_key("traces/", 1_760_000_000) < first_key("traces/", 1_760_000_060) < first_key("traces/", 1_760_086_400)
    )
    assert key_time("traces/x") is None
    assert key_time("traces/traces_x.binpb") is None
    assert unix_seconds_of(attempt(0)) == T0
