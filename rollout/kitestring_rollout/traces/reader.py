"""Reads traces back from object storage: tails new objects and hands out attempts once they are decided."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from uuid import UUID

from kitestring_api.names import PREFIX_TRACES
from kitestring_rollout.storage import ObjectMissing, ObjectStore
from kitestring_rollout.traces.attempts import LostAttempt, ProvenAttempt
from kitestring_rollout.traces.object_keys import first_key, key_time, unix_seconds_of
from kitestring_rollout.traces.objects import ObjectUnreadable, scan
from kitestring_rollout.traces.proof import AttemptSpans, CallSpan

_log = logging.getLogger(__name__)

_AHEAD = 16
"""Objects fetched while one is being read."""
_RECENT_SECONDS = 5.0
"""An ordinary look goes back so far: keys are made just before they are written."""
_FULL_EVERY_SECONDS = 10.0
"""So often a look goes back by the whole overlap."""
_SEEN_SECONDS = 900.0
"""Keys are remembered so long, in the time of the keys; the look before an attempt is given up goes back so far."""
_RELEASED = 1 << 16
"""So many released attempts are remembered, so that copies of their spans do not begin them anew."""


@dataclass(slots=True)
class ReaderCounts:
    """Totals since the reader was made."""

    objects: int = 0
    unreadable_objects: int = 0
    spans: int = 0
    corrupt_spans: int = 0
    foreign_spans: int = 0
    complete: int = 0
    lost: int = 0


class TraceReader:
    """Tails the trace objects below `prefix`; for one thread.

    It holds the spans of attempts that are not decided, and forgets those that it has handed out or that were released:
    memory follows the attempts in progress, not the run.

    - `since`: unix seconds; objects older than that are not looked at.
    - `grace_seconds`: an attempt whose end record has come but which is not complete is lost after so long.
    - `overlap_seconds`: how much later than its key's time an object may appear (slow writes, clocks of collectors).
    - `contents`: keep messages too, which training does not need.
    - `only`: leave out all other attempts.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = PREFIX_TRACES,
        *,
        since: float | None = None,
        grace_seconds: float = 30.0,
        overlap_seconds: float = 60.0,
        contents: bool = False,
        only: Collection[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._since = since
        self._grace = grace_seconds
        self._overlap = overlap_seconds
        self._contents = contents
        self._only = None if only is None else frozenset(UUID(attempt).bytes for attempt in only)
        self._clock = clock
        self._newest: float | None = None
        """Newest key read, in the time of the keys."""
        self._seen: dict[str, float] = {}
        self._next_full = float("-inf")
        self._attempts: dict[bytes, AttemptSpans] = {}
        self._deadlines: dict[bytes, float] = {}
        """Of attempts whose end record has come, by `clock`."""
        self._released: OrderedDict[bytes, None] = OrderedDict()
        self.counts = ReaderCounts()

    @property
    def open_attempts(self) -> int:
        """Attempts of which spans are held."""
        return len(self._attempts)

    def poll(self) -> Iterator[ProvenAttempt | LostAttempt]:
        """Read what is new and give every attempt that is decided now, as soon as it is.

        Raises StoreUnavailable; the next poll goes on where this one stopped.
        """
        now = self._clock()
        full = now >= self._next_full
        yield from self._read(self._start(self._overlap if full else min(_RECENT_SECONDS, self._overlap)))
        if full:
            self._next_full = now + _FULL_EVERY_SECONDS
        overdue = [trace for trace, deadline in self._deadlines.items() if deadline <= now]
        if overdue:
            yield from self._read(self._start(_SEEN_SECONDS))
            for trace in overdue:
                if trace in self._deadlines:
                    yield self._lose(trace, self._attempts[trace].verdict()[1])

    def release(self, attempt: str) -> None:
        """Forget an attempt, decided or not; spans of it that come later are ignored."""
        self._release(UUID(attempt).bytes)

    def undecided(self) -> Iterator[LostAttempt]:
        """What is held of attempts that are not decided, and why they are not."""
        for spans in self._attempts.values():
            yield lost_because(spans, spans.verdict()[1])

    def _start(self, back: float) -> str | None:
        """The key after which to list."""
        times = [moment for moment in (self._since, self._newest and self._newest - back) if moment is not None]
        return first_key(self._prefix, max(times)) if times else None

    def _read(self, start: str | None) -> Iterator[ProvenAttempt | LostAttempt]:
        new = (info.key for info in self._store.list(self._prefix, start) if info.key not in self._seen)
        with closing(_fetched(self._store, new)) as objects:
            for key, data in objects:
                if data is not None:
                    yield from self._index(key, data)
                self._saw(key)

    def _index(self, key: str, data: bytes) -> Iterator[ProvenAttempt | LostAttempt]:
        self.counts.objects += 1
        try:
            scanned = scan(data, self._wants, contents=self._contents)
        except ObjectUnreadable as error:
            self.counts.unreadable_objects += 1
            _log.error("trace object %s is left out: %s", key, error)
            return
        self.counts.spans += len(scanned.spans)
        self.counts.foreign_spans += scanned.foreign
        if scanned.corrupt:
            self.counts.corrupt_spans += scanned.corrupt
            _log.error("trace object %s holds %d corrupt spans", key, scanned.corrupt)
        touched: dict[bytes, AttemptSpans] = {}
        for trace, span in scanned.spans:
            spans = self._attempts.get(trace)
            if spans is None:
                spans = self._attempts[trace] = AttemptSpans(str(UUID(bytes=trace)))
            if isinstance(span, CallSpan):
                spans.add_call(span)
            else:
                spans.add_end(span)
            touched[trace] = spans
        for trace, spans in touched.items():
            decided = self._decide(trace, spans)
            if decided is not None:
                yield decided

    def _decide(self, trace: bytes, spans: AttemptSpans) -> ProvenAttempt | LostAttempt | None:
        if spans.end is None and spans.contradiction is None:
            return None
        state, reason = spans.verdict()
        if state == "complete":
            self._release(trace)
            self.counts.complete += 1
            return proven(spans)
        if state == "contradictory":
            return self._lose(trace, reason)
        self._deadlines.setdefault(trace, self._clock() + self._grace)
        return None

    def _lose(self, trace: bytes, reason: str) -> LostAttempt:
        lost = lost_because(self._attempts[trace], reason)
        self._release(trace)
        self.counts.lost += 1
        _log.error("attempt %s is lost: %s", lost.attempt, reason)
        return lost

    def _wants(self, trace: bytes) -> bool:
        return trace not in self._released and (self._only is None or trace in self._only)

    def _release(self, trace: bytes) -> None:
        self._attempts.pop(trace, None)
        self._deadlines.pop(trace, None)
        self._released[trace] = None
        if len(self._released) > _RELEASED:
            self._released.popitem(last=False)

    def _saw(self, key: str) -> None:
        moment = key_time(key)
        self._seen[key] = float("inf") if moment is None else moment
        if moment is None or (self._newest is not None and moment <= self._newest):
            return
        before = self._newest
        self._newest = moment
        if before is None or int(before / _SEEN_SECONDS) != int(moment / _SEEN_SECONDS):
            oldest = moment - _SEEN_SECONDS - self._overlap
            self._seen = {known: when for known, when in self._seen.items() if when >= oldest}


def proven(spans: AttemptSpans) -> ProvenAttempt:
    """What is handed out of an attempt whose verdict is `complete`."""
    assert spans.end is not None
    calls = tuple(spans.calls[seq] for seq in range(1, spans.end.record.n_calls + 1))
    return ProvenAttempt(spans.attempt, spans.end.record, calls, spans.duplicates, spans.late)


def lost_because(spans: AttemptSpans, reason: str) -> LostAttempt:
    """What is handed out of any other attempt."""
    end = spans.end.record if spans.end is not None else None
    return LostAttempt(spans.attempt, reason, end, tuple(spans.calls[seq] for seq in sorted(spans.calls)))


def read_attempts(
    store: ObjectStore,
    attempts: Iterable[str] | None = None,
    *,
    prefix: str = PREFIX_TRACES,
    contents: bool = True,
    overlap_seconds: float = 60.0,
) -> Iterator[ProvenAttempt | LostAttempt]:
    """The named attempts, or all of the run: the complete ones as they are found, then the others as lost.

    An attempt that is named and of which nothing is there is not given. Raises StoreUnavailable.
    """
    names = None if attempts is None else frozenset(attempts)
    since = min((_begun(name) for name in names), default=0.0) - overlap_seconds if names is not None else None
    reader = TraceReader(store, prefix, since=since, grace_seconds=float("inf"), contents=contents, only=names)
    left = len(names) if names is not None else None
    for decided in reader.poll():
        yield decided
        if left is not None:
            left -= 1
            if not left:
                return
    yield from reader.undecided()


def _begun(attempt: str) -> float:
    try:
        return unix_seconds_of(attempt)
    except ValueError:
        return 0.0


def _fetched(store: ObjectStore, keys: Iterable[str]) -> Generator[tuple[str, bytes | None]]:
    """The objects in the order of their keys, fetched ahead; None for one that is gone."""
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="fetch") as threads:
        waiting: deque[tuple[str, Future[bytes | None]]] = deque()
        try:
            for key in keys:
                waiting.append((key, threads.submit(_get, store, key)))
                if len(waiting) >= _AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _get(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except ObjectMissing:  # deleted since it was listed: a rule of the bucket
        return None
