"""The collector over HTTP: durable before acknowledged, bounded, and clear about what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # ships no types
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from kitestring_rollout.collector import app
from kitestring_rollout.collector.app import Collector, Credentials
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.storage import DirectoryStore, StoreRefused, StoreUnavailable

PROTOBUF = "application/x-protobuf"
TRUSTED = {"Authorization": "Bearer trusted", "Content-Type": PROTOBUF}
AGENT = {"Authorization": "Bearer agent", "Content-Type": PROTOBUF}


def request_of(spans: int, size: int = 10) -> bytes:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for _ in range(spans):
        scope.spans.add(name="x" * size)
    data: bytes = message.SerializeToString()
    return data


class WatchedStore(DirectoryStore):
    """A store that can be slow, or away."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.away = False
        self.refuses = False
        self.look: threading.Event | None = None
        """Waited for by each look at the store."""
        self.looks = 0
        self.loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.written = asyncio.Semaphore(0)
        """Released by each write that is over."""
        self.gate: asyncio.Event | None = None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if self.away:
            raise StoreUnavailable("away")
        self.loop.call_soon_threadsafe(self.entered.set)
        if self.gate is not None:
            asyncio.run_coroutine_threadsafe(self.gate.wait(), self.loop).result(20)
        super().put(key, data, if_absent=if_absent)
        self.loop.call_soon_threadsafe(self.written.release)

    def exists(self, key: str) -> bool:
        if self.refuses:
            raise StoreRefused("may write only")
        if self.away:
            raise StoreUnavailable("away")
        if self.look is not None:
            self.looks += 1
            self.look.wait(20)
        return super().exists(key)

    def held(self) -> list[str]:
        return [info.key for info in self.list()]


@dataclass
class Running:
    url: str
    store: WatchedStore
    session: aiohttp.ClientSession

    async def post(
        self, body: Any, route: str = "/v1/traces", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, Any]:
        async with self.session.post(self.url + route, data=body, headers=headers or TRUSTED) as response:
            return response.status, await response.read(), response.headers


@pytest.fixture
async def collector(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    options = getattr(request, "param", {})
    config = CollectorConfig.model_validate(
        {"store": {"kind": "directory", "path": tmp_path / "store"}, "credential_file": tmp_path / "c", **options}
    )
    store = WatchedStore(tmp_path / "store")
    runner = web.AppRunner(
        Collector(config, store, Credentials("trusted", "agent")).application(), access_log=None, auto_decompress=False
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield Running(f"http://127.0.0.1:{runner.addresses[0][1]}", store, session)
    await runner.cleanup()


def said(body: bytes) -> str:
    message: str = Status.FromString(body).message
    return message


async def test_a_request_becomes_one_object_as_it_was_sent(collector: Running) -> None:
    body = request_of(3) + b"\xfa\x07\x03new"  # a field of a later version
    status, answer, headers = await collector.post(body)
    assert (status, headers["Content-Type"]) == (200, PROTOBUF)
    assert ExportTraceServiceResponse.FromString(answer) == ExportTraceServiceResponse()
    (key,) = collector.store.held()
    assert key.startswith("traces/2")
    assert key.endswith(".binpb")
    assert collector.store.get(key) == body


async def test_the_untrusted_route_has_its_own_prefix_and_credential(collector: Running) -> None:
    assert (await collector.post(request_of(1), "/agent/v1/traces", AGENT))[0] == 200
    assert (await collector.post(request_of(1), "/agent/v1/traces", TRUSTED))[0] == 401
    assert (await collector.post(request_of(1), "/v1/traces", AGENT))[0] == 401
    (key,) = collector.store.held()
    assert key.startswith("agent/2")


@pytest.mark.parametrize(
    "credential", [None, "", "trusted", "Bearer", "Bearer wrong", "Bearer trusted2", "Basic trusted", "Bearer é"]
)
async def test_without_the_credential_nothing_is_taken(collector: Running, credential: str | None) -> None:
    headers = {"Content-Type": PROTOBUF} | ({} if credential is None else {"Authorization": credential})
    status, answer, answered = await collector.post(request_of(1), headers=headers)
    assert (status, answered["WWW-Authenticate"]) == (401, "Bearer")
    assert "credential" in said(answer)
    assert collector.store.held() == []


async def test_it_answers_only_when_the_object_is_durable(collector: Running) -> None:
    collector.store.gate = asyncio.Event()
    posted = asyncio.create_task(collector.post(request_of(1)))
    await asyncio.wait_for(collector.store.entered.wait(), 20)
    assert not posted.done()
    assert collector.store.held() == []
    collector.store.gate.set()
    assert (await posted)[0] == 200
    assert len(collector.store.held()) == 1


async def test_a_client_that_goes_away_does_not_stop_the_write(collector: Running) -> None:
    collector.store.gate = asyncio.Event()
    posted = asyncio.create_task(collector.post(request_of(1)))
    await asyncio.wait_for(collector.store.entered.wait(), 20)
    posted.cancel()
    collector.store.gate.set()
    assert (await collector.post(request_of(1)))[0] == 200
    for _ in range(2):  # the second may be over before the first
        await asyncio.wait_for(collector.store.written.acquire(), 20)
    assert len(collector.store.held()) == 2


async def test_while_the_store_is_away_clients_are_told_to_come_back(collector: Running) -> None:
    collector.store.away = True
    status, answer, headers = await collector.post(request_of(1))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "object store" in said(answer)
    async with collector.session.get(collector.url + "/health") as response:
        assert (response.status, await response.json()) == (200, {"store": "unavailable"})
    collector.store.away = False
    assert (await collector.post(request_of(1)))[0] == 200
    async with collector.session.get(collector.url + "/health") as response:
        assert await response.json() == {"store": "available"}


async def test_gzip_is_taken_and_stored_unpacked(collector: Running) -> None:
    body = request_of(100)
    members = gzip.compress(body[:50]) + gzip.compress(body[50:])
    for sent in (gzip.compress(body), members):
        assert (await collector.post(sent, headers={**TRUSTED, "Content-Encoding": "gzip"}))[0] == 200
    assert [collector.store.get(key) for key in collector.store.held()] == [body, body]


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"not protobuf", {}, 400, "ExportTraceServiceRequest"),
        (request_of(3)[:-1], {}, 400, "ExportTraceServiceRequest"),
        (b"not gzip", {"Content-Encoding": "gzip"}, 400, "not gzip"),
        (gzip.compress(request_of(3))[:-9], {"Content-Encoding": "gzip"}, 400, "cut short"),
        (zlib.compress(request_of(3)), {"Content-Encoding": "gzip"}, 400, "not gzip"),
        (request_of(1), {"Content-Encoding": "zstd"}, 415, "Content-Encoding"),
        (b"{}", {"Content-Type": "application/json"}, 415, "Content-Type"),
        (request_of(1), {"Content-Type": "text/plain"}, 415, "Content-Type"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    collector: Running, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answered, answer, _ = await collector.post(body, headers={**TRUSTED, **headers})
    assert answered == status
    assert words in said(answer)
    assert collector.store.held() == []


async def test_a_request_without_spans_is_answered_and_leaves_no_object(collector: Running) -> None:
    assert (await collector.post(b""))[0] == 200
    assert collector.store.held() == []


@pytest.mark.parametrize("collector", [{"max_request_bytes": 10_000}], indirect=True)
async def test_sizes_are_bounded(collector: Running) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    assert (await collector.post(request_of(1, 9000)))[0] == 200
    assert (await collector.post(request_of(1, 11_000)))[0] == 413
    assert (await collector.post(unannounced()))[0] == 413
    bomb = gzip.compress(bytes(100_000_000))
    assert len(bomb) > 10_000
    for sent in (
        gzip.compress(request_of(1, 11_000)),
        gzip.compress(bytes(5_000_000)),
        gzip.compress(b"") * 50 + gzip.compress(bytes(20_000)),
    ):
        assert len(sent) < 10_000
        status, answer, _ = await collector.post(sent, headers={**TRUSTED, "Content-Encoding": "gzip"})
        assert (status, "after decompression" in said(answer)) == (413, True)
    assert len(collector.store.held()) == 1


@pytest.mark.parametrize("collector", [{"max_pending_bytes": 25_000}], indirect=True)
async def test_bytes_in_hand_are_bounded(collector: Running) -> None:
    collector.store.gate = asyncio.Event()
    body = request_of(1, 20_000)
    first = asyncio.create_task(collector.post(body))
    await asyncio.wait_for(collector.store.entered.wait(), 20)
    status, answer, headers = await collector.post(body)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "wait to be stored" in said(answer)
    collector.store.gate.set()
    assert (await first)[0] == 200
    assert (await collector.post(body))[0] == 200


@pytest.mark.parametrize("collector", [{"body_seconds": 0.2}], indirect=True)
async def test_a_body_that_does_not_come_is_given_up(collector: Running) -> None:
    never = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b"x"
        await never.wait()

    assert (await collector.post(stuck()))[0] == 408


async def test_concurrent_requests_get_keys_of_their_own(collector: Running) -> None:
    answers = await asyncio.gather(*(collector.post(request_of(number + 1)) for number in range(60)))
    assert [status for status, _, _ in answers] == [200] * 60
    sizes = sorted(len(collector.store.get(key)) for key in collector.store.held())
    assert sizes == sorted(len(request_of(number + 1)) for number in range(60))


async def test_metrics(collector: Running) -> None:
    await collector.post(request_of(3))
    await collector.post(b"bad")
    async with collector.session.get(collector.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'kitestring_collector_requests_total{route="traces",status="200"} 1.0' in lines
    assert 'kitestring_collector_requests_total{route="traces",status="400"} 1.0' in lines
    assert 'kitestring_collector_spans_total{route="traces"} 3.0' in lines
    assert "kitestring_collector_pending_bytes 0.0" in lines


async def ready(collector: Running) -> tuple[int, str]:
    async with collector.session.get(collector.url + "/ready") as response:
        return response.status, (await response.json())["status"]


async def test_it_is_ready_while_the_store_answers(collector: Running) -> None:
    assert await ready(collector) == (200, "ok")
    collector.store.away = True
    assert await ready(collector) == (503, "away")
    assert (await collector.post(request_of(1)))[0] == 503
    collector.store.away = False
    assert await ready(collector) == (200, "ok")  # without a write that nobody would send
    collector.store.refuses = True
    assert await ready(collector) == (200, "ok")
    assert collector.store.held() == []


async def test_a_store_that_hangs_is_looked_at_once(collector: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_LOOK_SECONDS", 0.05)
    collector.store.look = threading.Event()
    found = await asyncio.gather(*(ready(collector) for _ in range(5)))
    found.append(await ready(collector))
    assert {status for status, _ in found} == {503}
    assert collector.store.looks == 1
    collector.store.look.set()
    collector.store.look = None
    async with asyncio.timeout(10):
        while (await ready(collector))[0] != 200:
            pass
