"""A gateway between a scripted model server and a collector that keeps what it gets, in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import uuid_utils
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from kitestring_rollout.gateway.app import running
from kitestring_rollout.gateway.attempts import Attempt
from kitestring_rollout.gateway.config import GatewayConfig
from kitestring_rollout.gateway.process import Process
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.traces.records import CallRecord
from tests.gateway.policy import Policy

Json = dict[str, Any]
CREDENTIAL = "admin-secret"


class Collector:
    """Takes spans on both routes; `open` may be cleared to answer 503."""

    def __init__(self) -> None:
        self.trusted: list[ExportTraceServiceRequest] = []
        self.untrusted: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.before: asyncio.Event | None = None
        self.app = web.Application(client_max_size=64 << 20)
        self.app.router.add_post("/v1/traces", self._trusted)
        self.app.router.add_post("/agent/v1/traces", self._untrusted)

    async def _trusted(self, request: web.Request) -> web.Response:
        return await self._take(request, self.trusted)

    async def _untrusted(self, request: web.Request) -> web.Response:
        return await self._take(request, self.untrusted)

    async def _take(self, request: web.Request, kept: list[ExportTraceServiceRequest]) -> web.Response:
        body = await request.read()
        if self.before is not None:
            await self.before.wait()
        if self.status != 200:
            return web.Response(status=self.status)
        kept.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    @property
    def spans(self) -> int:
        return sum(
            len(scope.spans)
            for request in self.trusted
            for part in request.resource_spans
            for scope in part.scope_spans
        )


@dataclass
class Opened:
    """An attempt as the executor sees it."""

    attempt: str
    base_url: str
    token: str
    epoch: str
    traceparent: str

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="anything", **{"max_retries": 0, **options})

    async def stream(self, **changes: Any) -> AsyncStream[ChatCompletionChunk]:
        created: Any = await self.openai().chat.completions.create(**chat(stream=True, **changes))
        assert isinstance(created, AsyncStream)
        return created


@dataclass
class Gateway:
    """Handles for a test: HTTP on both ports, and the records as they were made."""

    process: Process
    urls: dict[str, str]
    http: aiohttp.ClientSession
    policy: Policy
    frozen: Policy
    collector: Collector
    made: list[CallRecord] = field(default_factory=list)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A call is no longer in flight."""

    @property
    def records(self) -> list[CallRecord]:
        """Of all calls that are over."""
        self.process.recorder.flush()
        return self.made

    async def admin(
        self, method: str, path: str, body: Json | None = None, credential: str = CREDENTIAL
    ) -> tuple[int, Json]:
        async with self.http.request(
            method, self.urls["admin"] + path, json=body, headers={"Authorization": f"Bearer {credential}"}
        ) as reply:
            return reply.status, await reply.json()

    async def open(self, **changes: Any) -> Opened:
        status, body = await self.admin("POST", "/admin/v1/attempts", opening(**changes))
        assert status == 200, body
        return Opened(body["attempt"], body["base_url"], body["token"], body["epoch"], body["traceparent"])

    async def fence(self, opened: Opened) -> Json:
        status, body = await self.admin("POST", f"/admin/v1/attempts/{opened.attempt}/fence")
        assert status == 200, body
        return body

    async def post(
        self, opened: Opened, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, Json]:
        async with self.http.post(
            opened.base_url + path,
            headers=headers,
            **({"data": body} if isinstance(body, bytes) else {"json": body}),
        ) as reply:
            return reply.status, await reply.json()

    async def until_recorded(self, count: int) -> list[CallRecord]:
        while len(self.records) < count:
            self.recorded.clear()
            await asyncio.wait_for(self.recorded.wait(), 5)
        return self.records


def opening(**changes: Any) -> Json:
    limits = {"calls": 100, "concurrent_calls": 16, "tokens": 1_000_000, **changes.pop("limits", {})}
    reward = {"accepted": True, **changes.pop("reward", {})}
    return {
        "run": "run-1",
        "rollout": "t000001-00000000-000",
        "attempt": str(uuid_utils.uuid7()),
        "group": "t000001-00000000",
        "task": 3,
        "step": 1,
        "mode": "train",
        "limits": limits,
        "reward": reward,
        "lifetime_seconds": 600,
        **changes,
    }


def chat(**changes: Any) -> Json:
    return {"model": "policy", "messages": [{"role": "user", "content": "Say hello."}], **changes}


async def until(condition: Callable[[], bool]) -> None:
    """For a state that has no event of its own."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


Start = Callable[..., contextlib.AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`async with start(**config_changes) as gateway`."""
    (tmp_path / "token.key").write_bytes(bytes(range(32)))
    (tmp_path / "admin").write_text(CREDENTIAL + "\n")
    (tmp_path / "frozen").write_text("frozen-key\n")

    @contextlib.asynccontextmanager
    async def started(**changes: Any) -> AsyncIterator[Gateway]:
        policy, frozen, collector = Policy(), Policy(), Collector()
        async with contextlib.AsyncExitStack() as stack:
            servers = [TestServer(part.app) for part in (policy, frozen, collector)]
            for server in servers:
                await server.start_server()
                stack.push_async_callback(server.close)
            policy_url, frozen_url, collector_url = (str(server.make_url("")) for server in servers)
            config = GatewayConfig.model_validate(
                {
                    "run": "run-1",
                    "token_key_file": tmp_path / "token.key",
                    "admin_credential_file": tmp_path / "admin",
                    "policies": [{"name": "policy", "servers": [policy_url], "aliases": ["gpt-4o-mini"]}],
                    "frozen": [
                        {
                            "name": "judge",
                            "url": f"{frozen_url}/api/v1",
                            "model": "big-judge",
                            "api_key_file": tmp_path / "frozen",
                        }
                    ],
                    "collector": {"url": collector_url, "deadline_seconds": 2},
                    "connect_seconds": 0.2,
                    **changes,
                }
            )
            process, urls = await stack.enter_async_context(running(config))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            gateway = Gateway(process, urls, http, policy, frozen, collector)
            record = Session.record

            def kept(session: Session, call: CallRecord) -> None:
                record(session, call)
                gateway.made.append(call)
                gateway.recorded.set()

            leave = Attempt.leave

            def left(attempt: Attempt, *parts: Any, **named: Any) -> None:
                leave(attempt, *parts, **named)
                gateway.left.set()

            monkeypatch.setattr(Session, "record", kept)
            monkeypatch.setattr(Attempt, "leave", left)
            yield gateway

    return started


@pytest.fixture
async def gateway(start: Start) -> AsyncIterator[Gateway]:
    async with start() as running_gateway:
        yield running_gateway
