"""The exporter: group commit, and for every span a true word on whether it is durable."""

from __future__ import annotations

import asyncio
import socket
import time
from email.utils import formatdate

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kitestring_rollout.traces.conventions import CONTENTS_OMITTED, INPUT_MESSAGES, PAYLOAD
from kitestring_rollout.traces.encoder import CallEncoder, EncodedSpan
from kitestring_rollout.traces.exporter import GroupCommitExporter, SpanLost
from tests.traces.collector_stub import Answer, stub_collector
from tests.traces.rollouts import call, identity


def span(name: str, size: int = 0) -> EncodedSpan:
    return EncodedSpan(Span(name=name, trace_state="x" * size).SerializeToString(), b"")


def status(code: int, **headers: str) -> Answer:
    return lambda _: web.Response(status=code, headers=headers)


async def test_spans_of_many_attempts_go_out_in_one_request() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, credential="s3cret") as exporter:
        futures = [exporter.submit(span(str(number))) for number in range(50)]
        assert exporter.pending_spans == 50
        await asyncio.gather(*futures)
        assert [[one.name for one in request] for request in stub.requests] == [[str(number) for number in range(50)]]
        assert stub.headers[0]["Authorization"] == "Bearer s3cret"
        assert stub.headers[0]["Content-Type"] == "application/x-protobuf"
        assert (exporter.pending_spans, exporter.pending_bytes, exporter.counts.acknowledged) == (0, 0, 50)


async def test_a_span_waits_no_longer_than_the_linger() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        await exporter.submit(span("warm"))
        started = time.monotonic()
        first = exporter.submit(span("a"))
        await asyncio.sleep(0.03)
        second = exporter.submit(span("b"))
        await asyncio.gather(first, second)
        assert len(stub.requests) == 2
        assert time.monotonic() - started >= 0.045


async def test_urgent_spans_take_the_waiting_ones_along() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, linger_seconds=60) as exporter:
        patient = exporter.submit(span("patient"))
        await asyncio.wait_for(exporter.submit(span("urgent"), urgent=True), 20)
        assert patient.done()
        assert [one.name for one in stub.requests[0]] == ["patient", "urgent"]


async def test_what_waits_can_be_hurried() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, linger_seconds=60) as exporter:
        exporter.hurry()
        futures = [exporter.submit(span("a")), exporter.submit(span("b"))]
        exporter.hurry()
        await asyncio.wait_for(asyncio.gather(*futures), 20)
        assert len(stub.requests) == 1


async def test_a_future_is_done_only_when_the_collector_has_answered() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.gate.clear()
        future = exporter.submit(span("a"))
        await stub.wait_for_requests(1)
        assert not future.done()
        stub.gate.set()
        await future


async def test_leaving_sees_every_span_through() -> None:
    async with stub_collector() as stub:
        async with GroupCommitExporter(stub.url, linger_seconds=60) as exporter:
            future = exporter.submit(span("a"))
        assert future.done()
        assert future.exception() is None


async def test_large_batches_are_split_and_a_large_span_goes_alone() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, max_request_bytes=10_000) as exporter:
        sizes = [4000, 4000, 4000, 50_000, 100]
        await asyncio.gather(*(exporter.submit(span(str(size), size)) for size in sizes))
        assert sorted(len(request) for request in stub.requests) == [1, 1, 1, 2]


@pytest.mark.parametrize("code", [429, 502, 503, 504])
async def test_answers_that_allow_it_are_retried(code: int) -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.answers = [status(code), status(code)]
        await exporter.submit(span("a"))
        assert [[one.name for one in request] for request in stub.requests] == [["a"]] * 3
        assert exporter.counts.retries == 2


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_honoured(form: str) -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        wait = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
        stub.answers = [status(503, **{"Retry-After": wait})]
        started = time.monotonic()
        await exporter.submit(span("a"))
        assert time.monotonic() - started >= 0.95


async def test_a_collector_that_comes_up_later_gets_everything() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    async with GroupCommitExporter(f"http://127.0.0.1:{port}/v1/traces") as exporter:
        future = exporter.submit(span("a"))
        while not exporter.counts.retries:  # noqa: ASYNC110 (a counter has no event)
            await asyncio.sleep(0.01)
        app = web.Application()
        app.router.add_post("/v1/traces", _accept)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await future
        await runner.cleanup()


async def _accept(_: web.Request) -> web.Response:
    return web.Response(body=b"")


async def test_past_the_deadline_a_span_is_lost() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, deadline_seconds=0.5) as exporter:
        stub.answers = [status(503)] * 100
        with pytest.raises(SpanLost, match="HTTP 503"):
            await exporter.submit(span("a"))
        assert (exporter.counts.lost, exporter.pending_bytes) == (1, 0)
        stub.answers = []
        await exporter.submit(span("b"))


async def test_a_collector_that_hangs_is_given_up_at_the_deadline() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, deadline_seconds=0.5) as exporter:
        stub.gate.clear()
        with pytest.raises(SpanLost, match="TimeoutError"):
            await exporter.submit(span("a"))
        stub.gate.set()


@pytest.mark.parametrize("code", [401, 404, 415])
async def test_a_refusal_is_final(code: int) -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.answers = [status(code)]
        with pytest.raises(SpanLost, match=f"HTTP {code}"):
            await exporter.submit(span("a"))
        assert len(stub.requests) == 1


@pytest.mark.parametrize("code", [400, 413])
async def test_one_span_that_is_refused_does_not_take_the_others_with_it(code: int) -> None:
    def refuses_bad(spans: list[Span]) -> web.Response:
        bad = any(one.name == "bad" for one in spans)
        return web.Response(status=code if bad else 200)

    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.answers = [refuses_bad] * 20
        names = ["a", "b", "bad", "c", "d"]
        results = await asyncio.gather(*(exporter.submit(span(name)) for name in names), return_exceptions=True)
        assert [name for name, result in zip(names, results, strict=True) if result is not None] == ["bad"]
        assert (exporter.counts.acknowledged, exporter.counts.lost) == (4, 1)


@pytest.mark.parametrize("code", [400, 413])
async def test_a_span_that_is_refused_for_its_contents_is_sent_without_them(code: int) -> None:
    def refuses_contents(spans: list[Span]) -> web.Response:
        return web.Response(status=code if any(INPUT_MESSAGES in str(one) for one in spans) else 200)

    one, other = (CallEncoder(identity()).encode(call(seq)) for seq in (1, 2))
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.answers = [refuses_contents] * 20
        await asyncio.gather(exporter.submit(one), exporter.submit(other))
        taken = [request[0] for request in stub.requests if INPUT_MESSAGES not in str(request)]
        assert [PAYLOAD in str(span) and CONTENTS_OMITTED in str(span) for span in taken] == [True, True]
        assert (exporter.counts.acknowledged, exporter.counts.lost, exporter.pending_bytes) == (2, 0, 0)


async def test_contents_give_way_before_a_span_is_lost() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, max_pending_bytes=100_000) as exporter:
        stub.gate.clear()
        rooms, futures = [exporter.contents_room], []
        for _ in range(6):
            futures.append(exporter.submit(span("a", 10_000)))
            rooms.append(exporter.contents_room)
        assert rooms == sorted(rooms, reverse=True)
        assert rooms[0] == 6250 and rooms[5:] == [0, 0]
        stub.gate.set()
        await asyncio.gather(*futures)
        assert exporter.contents_room == 6250


async def test_partial_success_is_no_success() -> None:
    rejected = ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=1, error_message="no")
    )
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.answers = [lambda _: web.Response(body=rejected.SerializeToString())]
        results = await asyncio.gather(exporter.submit(span("a")), exporter.submit(span("b")), return_exceptions=True)
        assert [type(result) for result in results] == [SpanLost, SpanLost]


async def test_an_answer_that_is_no_otlp_is_no_success() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        stub.answers = [lambda _: web.Response(text="<html>welcome")]
        with pytest.raises(SpanLost, match="not an ExportTraceServiceResponse"):
            await exporter.submit(span("a"))


async def test_memory_is_bounded() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url, max_pending_bytes=10_000) as exporter:
        stub.gate.clear()
        kept = [exporter.submit(span("a", 4000)) for _ in range(2)]
        with pytest.raises(SpanLost, match="wait for the collector"):
            await exporter.submit(span("b", 4000))
        stub.gate.set()
        await asyncio.gather(*kept)
        await exporter.submit(span("c", 4000))


async def test_few_requests_are_in_flight_at_once() -> None:
    async with (
        stub_collector() as stub,
        GroupCommitExporter(stub.url, max_request_bytes=100, max_in_flight=2) as exporter,
    ):
        stub.gate.clear()
        futures = [exporter.submit(span(str(number), 90)) for number in range(6)]
        await stub.wait_for_requests(2)
        await asyncio.sleep(0.05)
        assert len(stub.requests) == 2
        stub.gate.set()
        await asyncio.gather(*futures)
        assert len(stub.requests) == 6


async def test_a_waiter_that_went_away_does_no_harm() -> None:
    async with stub_collector() as stub, GroupCommitExporter(stub.url) as exporter:
        gone, stays = exporter.submit(span("a")), exporter.submit(span("b"))
        gone.cancel()
        await stays
        assert exporter.counts.acknowledged == 2


@pytest.mark.parametrize("halves", [False, True])
async def test_a_bug_while_sending_loses_the_batch_and_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, halves: bool
) -> None:
    tries = 0

    async def broken(self: GroupCommitExporter, body: bytes, deadline: float) -> tuple[str | None, float | None]:
        nonlocal tries
        tries += 1
        if halves and tries == 1:
            return "HTTP 400: too much", None
        if halves and tries == 2:
            return None, None
        raise ZeroDivisionError("a bug")

    async with stub_collector() as stub, GroupCommitExporter(stub.url, linger_seconds=0) as exporter:
        with monkeypatch.context() as patched:
            patched.setattr(GroupCommitExporter, "_try", broken)
            futures = [exporter.submit(span(name)) for name in ("a", "b")]
            done = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 20)
        assert [isinstance(one, SpanLost) for one in done] == [not halves, True]
        assert "ZeroDivisionError" in str(done[1]) and "ZeroDivisionError" in caplog.text
        assert (exporter.pending_spans, exporter.pending_bytes) == (0, 0)
        await exporter.submit(span("c"))
