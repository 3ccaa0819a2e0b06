"""The agents' side against agents that try what they may not: tokens, routes, rewards, spans."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp.http_writer import StreamWriter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kitestring_rollout.gateway import agent_traces
from kitestring_rollout.gateway.token import Claims, sign
from kitestring_rollout.traces.wire import field
from tests.gateway.conftest import Gateway, Opened, chat, until


async def call(
    gateway: Gateway, token: str, *, headers: dict[str, str] | None = None, prefix: bool = True
) -> tuple[int, Any]:
    base = gateway.urls["agents"] + (f"/r/{token}" if prefix else "")
    async with gateway.http.post(f"{base}/v1/chat/completions", json=chat(), headers=headers) as reply:
        return reply.status, await reply.json()


async def test_the_token_comes_in_the_path_as_bearer_or_as_x_api_key(gateway: Gateway) -> None:
    opened = await gateway.open()
    bearer, key = {"Authorization": f"Bearer {opened.token}"}, {"x-api-key": opened.token}
    assert (await call(gateway, opened.token))[0] == 200
    assert (await call(gateway, "", headers=bearer, prefix=False))[0] == 200
    assert (await call(gateway, "", headers=key, prefix=False))[0] == 200
    assert (await call(gateway, "", prefix=False))[0] == 401


@pytest.mark.parametrize("port", ["agents", "admin"])
async def test_a_head_without_an_end_is_refused(gateway: Gateway, port: str) -> None:
    url = urlsplit(gateway.urls[port])
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n" + b"X-Y: %s\r\n" % (b"a" * 6000) * 3)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 431 ")
    writer.close()
    if port == "agents":
        text = gateway.process.metrics_text().decode()
        assert 'kitestring_gateway_connections_closed_total{reason="head_too_large"} 1.0' in text
        assert "kitestring_gateway_connections 0.0" in text


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/v1/models", "", 401),
        ("/v1/models", "Authorization: Bearer of-another", 401),
        ("/nowhere", "", 404),
        ("/health", "", 200),
        ("/r/TOKEN/nowhere", "", 404),
    ],
)
async def test_a_stranger_has_one_request_of_a_connection(
    gateway: Gateway, path: str, header: str, status: int
) -> None:
    """Many answers that nobody reads would hold the sockets' buffers full of them."""
    opened = await gateway.open()
    got = await _pipelined(gateway, path.replace("TOKEN", opened.token), header)
    assert got.count(f"HTTP/1.1 {status} ") == got.count("HTTP/1.1 ") == 1


async def test_an_agent_has_as_many_as_it_asks_for(gateway: Gateway) -> None:
    opened = await gateway.open()
    got = await _pipelined(gateway, f"/r/{opened.token}/v1/models", "")
    assert got.count("HTTP/1.1 200 ") == 3


async def _pipelined(gateway: Gateway, path: str, header: str) -> str:
    """What is answered to three requests at once, of which the last asks for the end of the connection."""
    url = urlsplit(gateway.urls["agents"])
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"GET {path} HTTP/1.1\r\nHost: here\r\n" + (header and header + "\r\n")
    writer.write(f"{head}\r\n{head}\r\n{head}Connection: close\r\n\r\n".encode())
    got = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return got.decode()


async def test_an_answer_that_nobody_reads_counts_as_a_request_in_flight(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await gateway.open()
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None
    blocked = asyncio.Event()

    async def drain(_: object) -> None:
        blocked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(StreamWriter, "drain", drain)
    asking = asyncio.create_task(gateway.http.get(f"{opened.base_url}/v1/models"))
    await blocked.wait()
    assert session.serving == 1
    asking.cancel()
    monkeypatch.undo()


async def test_other_tokens_are_refused_and_counted(gateway: Gateway) -> None:
    opened = await gateway.open()

    def token(key: bytes = gateway.process.token_key, **changes: Any) -> str:
        claims: dict[str, Any] = {
            "run": "run-1",
            "rollout": "r",
            "attempt": opened.attempt,
            "mode": "train",
            "scopes": ("calls", "rewards", "spans"),
            "expires": time.time() + 60,
            "epoch": gateway.process.epoch,
        }
        return sign(Claims(**{**claims, **changes}), key)

    for given, status, code in (
        (token(key=b"x" * 32), 401, "invalid_token"),
        (opened.token[:-2], 401, "invalid_token"),
        (token(expires=time.time() - 1), 401, "token_expired"),
        (token(epoch="0" * 16), 410, "epoch_gone"),
        (token(scopes=("rewards",)), 403, "wrong_scope"),
        (token(attempt="0190d3c5-0000-7000-8000-000000000001"), 410, "attempt_closed"),
    ):
        found, body = await call(gateway, given)
        assert (found, body["error"]["code"]) == (status, code)
        assert f'refused_total{{code="{code}"}}'.encode() in gateway.process.metrics_text()
    assert not gateway.policy.requests and (await gateway.fence(opened))["n_calls"] == 0


async def test_an_expired_attempt_is_refused_at_its_own_token(gateway: Gateway) -> None:
    opened = await gateway.open(lifetime_seconds=0.001)
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None
    await until(lambda: time.time() >= session.attempt.expires)
    status, body = await call(gateway, opened.token)
    assert (status, body["error"]["code"]) == (401, "token_expired")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/pause?mode=abort", 404),
        ("POST", "/collective_rpc", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/v1/../pause", 404),
        ("POST", "/v1/%2e%2e/pause", 404),
        ("POST", "//pause", 404),
        ("GET", "/metrics", 404),
        ("GET", "/admin/v1/status", 404),
        ("POST", "/admin/v1/attempts", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/rewards", 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_no_other_route_leads_anywhere(gateway: Gateway, method: str, path: str, status: int) -> None:
    from yarl import URL

    opened = await gateway.open()
    url = URL(opened.base_url + path, encoded=True)
    async with gateway.http.request(method, url, json={}) as reply:
        assert reply.status == status
        assert (await reply.json())["error"]["code"] in ("unknown_route", "method_not_allowed")
    assert not gateway.policy.paths


async def test_health_needs_no_token_and_tells_nothing(gateway: Gateway) -> None:
    async with gateway.http.get(gateway.urls["agents"] + "/health") as reply:
        assert (reply.status, await reply.json()) == (200, {"status": "ok"})


async def reward(gateway: Gateway, opened: Opened, body: bytes) -> tuple[int, str | None]:
    status, answer = await gateway.post(opened, body, "/rewards")
    return status, answer.get("error", {}).get("code")


async def test_rewards_of_an_agent(gateway: Gateway) -> None:
    opened = await gateway.open(reward={"minimum": 0, "maximum": 1})
    assert await reward(gateway, opened, b'{"value": NaN}') == (422, "reward_unusable")
    assert await reward(gateway, opened, b'{"value": 7}') == (422, "reward_unusable")
    assert await reward(gateway, opened, b'{"value": 0.5}') == (200, None)
    assert await reward(gateway, opened, b'{"value": 1.0}') == (409, "reward_duplicate")
    fenced = await gateway.fence(opened)
    assert [(given["name"], given["value"]) for given in fenced["rewards"]] == [("reward", 0.5)]
    assert fenced["calls"]["rejected"] == 3


async def test_rewards_are_refused_where_the_pool_takes_none(gateway: Gateway) -> None:
    opened = await gateway.open(reward={"accepted": False})
    assert await reward(gateway, opened, b'{"value": 1.0}') == (403, "wrong_scope")
    fenced = await gateway.fence(opened)
    assert (fenced["rewards"], fenced["calls"]["rejected"]) == ([], 1)


def agents_request(**attributes: str) -> bytes:
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    scope = resource.scope_spans.add()
    span = scope.spans.add(name="execute_tool add", trace_id=b"t" * 16, span_id=b"s" * 8)
    for place in (resource.resource.attributes, scope.scope.attributes, span.attributes, span.events.add().attributes):
        for name, value in {"kitestring.run": "stolen", "kitestring.attempt": "other", **attributes}.items():
            place.add(key=name).value.string_value = value
    return request.SerializeToString()


async def send_spans(gateway: Gateway, opened: Opened, body: bytes, **headers: str) -> tuple[int, bytes]:
    async with gateway.http.post(
        f"{opened.base_url}/otlp/v1/traces", data=body, headers={"Content-Type": "application/x-protobuf", **headers}
    ) as reply:
        return reply.status, await reply.read()


@pytest.mark.parametrize("compressed", [False, True])
async def test_agents_spans_carry_the_tokens_identity(gateway: Gateway, compressed: bool) -> None:
    opened = await gateway.open()
    body = agents_request(**{"gen_ai.tool.name": "add"})
    if compressed:
        status, _ = await send_spans(gateway, opened, gzip.compress(body), **{"Content-Encoding": "gzip"})
    else:
        status, _ = await send_spans(gateway, opened, body)
    assert status == 200 and not gateway.collector.trusted
    (request,) = gateway.collector.untrusted
    raw = request.SerializeToString()
    assert b"stolen" not in raw and b"other" not in raw
    resource = request.resource_spans[0]
    stamped = {attribute.key: attribute.value for attribute in resource.resource.attributes}
    assert (
        stamped["kitestring.run"].string_value == "run-1"
        and stamped["kitestring.attempt"].string_value == opened.attempt
    )
    assert stamped["gen_ai.tool.name"].string_value == "add"
    span = resource.scope_spans[0].spans[0]
    assert [attribute.key for attribute in span.attributes] == ["gen_ai.tool.name"]
    assert (await gateway.fence(opened))["n_calls"] == 0, "spans are no part of the proof"


async def test_agents_spans_are_limited(gateway: Gateway) -> None:
    opened = await gateway.open(limits={"agent_span_bytes": 1000})
    small, bomb = agents_request(), gzip.compress(b"\0" * 10_000_000)
    assert (await send_spans(gateway, opened, bomb, **{"Content-Encoding": "gzip"}))[0] == 413
    statuses = [(await send_spans(gateway, opened, small))[0] for _ in range(8)]
    assert statuses[0] == 200 and statuses[-1] == 413
    assert sum(len(request.SerializeToString()) > 0 for request in gateway.collector.untrusted) == statuses.count(200)


def one_span(inside: bytes) -> bytes:
    """An export request of one span with these fields."""
    return field(b"\x0a", field(b"\x12", field(b"\x12", inside)))


@pytest.mark.parametrize(
    "bomb",
    [
        one_span(b"\x4a\0" * 1_000_000),
        one_span(b"\x5a\0" * 1_000_000),
        one_span(b"\x6a\0" * 1_000_000),
        field(b"\x0a", field(b"\x12", b"\x12\0" * 1_000_000)),
        field(b"\x0a", b"\x12\0" * 1_000_000),
        b"\x0a\0" * 1_000,
        one_span(field(b"\x4a", field(b"\x12", field(b"\x2a", b"\x0a\0" * 1_000_000)))),
    ],
    ids=["attributes", "events", "links", "spans", "scopes", "resources", "values"],
)
async def test_many_empty_things_are_refused_before_they_are_unfolded(
    gateway: Gateway, bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await gateway.open()
    if len(bomb) > 10_000:
        monkeypatch.setattr(agent_traces, "restamp", None)  # nothing is parsed
    status, body = await send_spans(gateway, opened, gzip.compress(bomb), **{"Content-Encoding": "gzip"})
    assert status == 413 and b"send fewer spans at a time" in body
    assert not gateway.collector.untrusted


async def test_a_full_batch_of_spans_passes_as_it_is(gateway: Gateway) -> None:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(512):
        span = scope.spans.add(name="chat", trace_id=b"t" * 16, span_id=number.to_bytes(8), kind=3)
        for place in range(40):
            span.attributes.add(key=f"gen_ai.attribute.{place}").value.string_value = "x" * (place * 2)
    opened = await gateway.open()
    assert (await send_spans(gateway, opened, request.SerializeToString()))[0] == 200
    (passed,) = gateway.collector.untrusted
    assert passed.resource_spans[0].scope_spans == request.resource_spans[0].scope_spans


async def test_empty_things_count_as_more_than_they_take_to_send(gateway: Gateway) -> None:
    opened = await gateway.open(limits={"agent_span_bytes": 10_000})
    body = one_span(b"\x4a\0" * 300)
    assert [(await send_spans(gateway, opened, body))[0] for _ in range(3)] == [200, 200, 413]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff", {}, 400),
        (agents_request()[:-1], {}, 400),
        (b"{}", {"Content-Type": "application/json"}, 415),
        (b"x", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(agents_request())[:-4], {"Content-Encoding": "gzip"}, 400),
        (b"x", {"Content-Encoding": "br"}, 415),
    ],
)
async def test_spans_that_cannot_be_read(gateway: Gateway, body: bytes, headers: dict[str, str], status: int) -> None:
    opened = await gateway.open()
    assert (await send_spans(gateway, opened, body, **headers))[0] == status
    assert not gateway.collector.untrusted


async def test_spans_after_the_fence_and_while_the_collector_is_away(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.collector.status = 503
    assert (await send_spans(gateway, opened, agents_request()))[0] == 503
    gateway.collector.status = 200
    await gateway.fence(opened)
    assert (await send_spans(gateway, opened, agents_request()))[0] == 410


async def test_a_token_is_in_no_log(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    opened = await gateway.open()
    gateway.collector.status = 400
    with caplog.at_level(0):
        await call(gateway, opened.token)
        await call(gateway, opened.token + "x")
        async with aiohttp.ClientSession() as session, session.post(f"{opened.base_url}/v1/nowhere") as reply:
            assert reply.status == 404
        await gateway.fence(opened)
    logged = [
        record
        for record in caplog.records
        if record.name.startswith(("kitestring", "aiohttp.server", "aiohttp.access"))
    ]
    assert logged and not any(opened.token in record.getMessage() for record in logged)
