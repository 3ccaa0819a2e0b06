"""A collector that answers as it is told and keeps what it got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Answer = Callable[[list[Span]], web.Response]


def accepted(_: list[Span]) -> web.Response:
    return web.Response(body=ExportTraceServiceResponse().SerializeToString())


@dataclass
class StubCollector:
    """Give `answers` to make the next requests fail; after that it accepts."""

    answers: list[Answer] = field(default_factory=list)
    requests: list[list[Span]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Requests wait for it; it is set unless a test clears it."""
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    url: str = ""

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        spans = [span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans]
        self.requests.append(spans)
        self.headers.append(dict(request.headers))
        async with self.arrived:
            self.arrived.notify_all()
        await self.gate.wait()
        return (self.answers.pop(0) if self.answers else accepted)(spans)

    async def wait_for_requests(self, count: int) -> None:
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(lambda: len(self.requests) >= count), 20)


@asynccontextmanager
async def stub_collector() -> AsyncIterator[StubCollector]:
    stub = StubCollector()
    stub.gate.set()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/traces", stub.receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
        yield stub
    finally:
        stub.gate.set()
        await runner.cleanup()
