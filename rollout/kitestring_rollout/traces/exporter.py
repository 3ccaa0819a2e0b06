"""Sends spans to the collector, many attempts in one request, and knows of each span whether it is durable."""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from kitestring_rollout.traces.encoder import EncodedSpan
from kitestring_rollout.traces.requests import export_request

_log = logging.getLogger(__name__)

_RETRYABLE = frozenset((408, 429, 500, 502, 503, 504))
_TOO_MUCH = frozenset((400, 413))
"""Answers that may be about one span of many: the request is sent again in halves."""
_PARTS_OF_ROOM = 8
"""One span's contents may take this part of the room that contents have left: by default 16 MiB, which fits into the
20 MiB that an OpenTelemetry Collector takes in a request unless told otherwise."""
_TRY_SECONDS = 30.0
_FIRST_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 5.0


class SpanLost(Exception):
    """A span could not be made durable: its attempt is lost."""


@dataclass(slots=True)
class ExportCounts:
    """Totals since the start of the process."""

    submitted: int = 0
    acknowledged: int = 0
    lost: int = 0
    requests: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Batch:
    spans: list[EncodedSpan] = field(default_factory=list)
    futures: list[asyncio.Future[None]] = field(default_factory=list)
    size: int = 0
    deadline: float = 0.0
    """Monotonic; of the oldest span."""


_Part = tuple[Sequence[EncodedSpan], Sequence[asyncio.Future[None]]]


class GroupCommitExporter:
    """Exports to one OTLP/HTTP endpoint; use it as an async context manager, in one event loop.

    The first span of a batch starts a timer of `linger_seconds` (or `urgent_seconds`); what has come until then, from
    all attempts, goes out in one request. Answers that allow it are retried with exponential backoff and jitter,
    honouring Retry-After, until `deadline_seconds` after the span was submitted; then its future fails with `SpanLost`.
    At most `max_pending_bytes` wait for acknowledgement: a span beyond that is lost at once. A span that is refused as
    too large by itself is sent once more without its contents.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        credential: str | None = None,
        resource: dict[str, str] | None = None,
        deadline_seconds: float = 60.0,
        max_pending_bytes: int = 256 << 20,
        max_request_bytes: int = 1 << 20,
        linger_seconds: float = 0.05,
        urgent_seconds: float = 0.005,
        max_in_flight: int = 4,
    ) -> None:
        self._endpoint = endpoint
        self._headers = {"Content-Type": "application/x-protobuf"}
        if credential is not None:
            self._headers["Authorization"] = f"Bearer {credential}"
        self._resource = resource or {}
        self.deadline_seconds = deadline_seconds
        self._max_pending = max_pending_bytes
        self._max_request = max_request_bytes
        self._linger = linger_seconds
        self._urgent = urgent_seconds
        self._slots = asyncio.Semaphore(max_in_flight)
        self._batch = _Batch()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None
        self.counts = ExportCounts()
        self.pending_bytes = 0
        """Of spans submitted and neither acknowledged nor lost."""

    @property
    def pending_spans(self) -> int:
        return self.counts.submitted - self.counts.acknowledged - self.counts.lost

    @property
    def contents_room(self) -> int:
        """Bytes of contents that the next span may bring. They may take half of what may wait, large ones giving way
        first: the other half is for what an attempt is lost without."""
        return max(0, self._max_pending // 2 - self.pending_bytes) // _PARTS_OF_ROOM

    async def __aenter__(self) -> GroupCommitExporter:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what waits and see every span acknowledged or lost."""
        self._flush()
        while self._sending:
            await asyncio.gather(*self._sending)
        if self._session is not None:
            await self._session.close()

    def submit(self, span: EncodedSpan, *, urgent: bool = False) -> asyncio.Future[None]:
        """Take a span; the future is done when it is durable, or fails with `SpanLost`.

        `urgent` shortens the wait for company: someone waits for this acknowledgement.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts.submitted += 1
        size = len(span.data)
        if self.pending_bytes + size > self._max_pending:
            self.counts.lost += 1
            _log.error("span lost: %d bytes wait for the collector already", self.pending_bytes)
            future.set_exception(SpanLost(f"{self.pending_bytes} bytes of spans wait for the collector already"))
            return future
        self.pending_bytes += size
        batch = self._batch
        if batch.spans and batch.size + size > self._max_request:
            self._flush()
            batch = self._batch
        if not batch.spans:
            batch.deadline = time.monotonic() + self.deadline_seconds
        batch.spans.append(span)
        batch.futures.append(future)
        batch.size += size
        self._flush_within(self._urgent if urgent else self._linger)
        return future

    def hurry(self) -> None:
        """Someone waits for spans that were submitted: send what waits as if it were urgent."""
        if self._batch.spans:
            self._flush_within(self._urgent)

    def _flush_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is None or self._timer.when() > loop.time() + seconds:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(seconds, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch.spans:
            task = asyncio.get_running_loop().create_task(self._send_in_turn(self._batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            self._batch = _Batch()

    async def _send_in_turn(self, batch: _Batch) -> None:
        parts: list[_Part] = [(batch.spans, batch.futures)]
        try:
            async with self._slots:
                while parts:
                    rest = await self._send(*parts[-1], batch.deadline)
                    parts[-1:] = reversed(rest)
        except BaseException as bug:
            # Someone waits for every span: whatever happens here, they hear what became of it.
            _log.exception("the export of a batch failed")
            for spans, futures in parts:
                self._settle(spans, futures, f"the export failed: {type(bug).__name__}: {bug}")
            if not isinstance(bug, Exception):
                raise

    async def _send(
        self, spans: Sequence[EncodedSpan], futures: Sequence[asyncio.Future[None]], deadline: float
    ) -> tuple[_Part, ...]:
        """Settles the spans, or gives them back in the parts that are to be sent instead."""
        body = export_request([span.data for span in spans], self._resource)
        attempt = 0
        while True:
            problem, retry_after = await self._try(body, deadline)
            if problem is None:
                self._settle(spans, futures, None)
                return ()
            if retry_after is None:
                if problem.startswith(tuple(f"HTTP {status}" for status in _TOO_MUCH)):
                    smaller = self._smaller(spans, futures)
                    if smaller:
                        return smaller
                self._settle(spans, futures, f"the collector refused it: {problem}")
                return ()
            backoff = min(_FIRST_BACKOFF_SECONDS * 2.0**attempt, _MAX_BACKOFF_SECONDS) * random.uniform(0.5, 1.0)  # noqa: S311
            wait = max(backoff, retry_after)
            if time.monotonic() + wait >= deadline:
                self._settle(
                    spans, futures, f"the collector did not take it within {self.deadline_seconds:g} s: {problem}"
                )
                return ()
            attempt += 1
            self.counts.retries += 1
            _log.warning("export of %d spans failed (%s); trying again in %.2f s", len(spans), problem, wait)
            await asyncio.sleep(wait)

    def _smaller(self, spans: Sequence[EncodedSpan], futures: Sequence[asyncio.Future[None]]) -> tuple[_Part, ...]:
        """What to send in place of a request that was refused as a whole; nothing when it is as small as it can be."""
        if len(spans) > 1:
            half = len(spans) // 2
            return (spans[:half], futures[:half]), (spans[half:], futures[half:])
        (span,) = spans
        start, end = span.contents
        if start == end:
            return ()
        bare = span.without_contents()
        self.pending_bytes -= len(span.data) - len(bare.data)
        _log.warning("a span of %d bytes was refused; it is sent again without its contents", len(span.data))
        return (((bare,), futures),)

    async def _try(self, body: bytes, deadline: float) -> tuple[str | None, float | None]:
        """(None, _) when acknowledged; else the problem, and the least wait in seconds or None when final."""
        if self._session is None:
            raise RuntimeError("the exporter is not open: use `async with`")
        self.counts.requests += 1
        timeout = aiohttp.ClientTimeout(total=max(0.1, min(_TRY_SECONDS, deadline - time.monotonic())))
        try:
            # A file object: aiohttp sends it in pieces, where bytes of this size would block the loop.
            async with self._session.post(self._endpoint, data=io.BytesIO(body), timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}", 0.0
        if response.status in _RETRYABLE:
            return f"HTTP {response.status}", _retry_after(response.headers.get("Retry-After"))
        if response.status != 200:
            return f"HTTP {response.status}: {answer[:200]!r}", None
        try:
            rejected = ExportTraceServiceResponse.FromString(answer).partial_success
        except DecodeError:
            return "the answer is not an ExportTraceServiceResponse", None
        if rejected.rejected_spans:
            return f"{rejected.rejected_spans} spans rejected: {rejected.error_message}", None
        return None, None

    def _settle(
        self, spans: Sequence[EncodedSpan], futures: Sequence[asyncio.Future[None]], problem: str | None
    ) -> None:
        self.pending_bytes -= sum(len(span.data) for span in spans)
        if problem is None:
            self.counts.acknowledged += len(spans)
        else:
            self.counts.lost += len(spans)
            _log.error("%d spans lost: %s", len(spans), problem)
        for future in futures:
            if future.done():  # the waiter was cancelled
                continue
            if problem is None:
                future.set_result(None)
            else:
                future.set_exception(SpanLost(problem))


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header (a number or a date); 0 when there is none or it cannot be read."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
