"""Limits of an attempt: 429 in OpenAI's shape with a code that says which, never retried by a client, counted."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from typing import Any

import openai
import orjson
import pytest
from yarl import URL

from kitestring_rollout.gateway.bodies import unfolding, widening
from tests.gateway.conftest import Gateway, Opened, Start, chat, until
from tests.gateway.policy import Plan


async def refused(gateway: Gateway, code: str, model: str = "policy", **limits: Any) -> dict[str, Any]:
    """Calls until the limit, which answers the next one; returns what the fence says."""
    opened = await gateway.open(limits=limits)
    client = opened.openai(max_retries=2)
    await client.chat.completions.create(**chat(model=model))
    before = len(gateway.policy.requests) + len(gateway.frozen.requests)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(**chat(model=model))
    assert caught.value.code == code
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "Retry-After" not in caught.value.response.headers
    assert len(gateway.policy.requests) + len(gateway.frozen.requests) == before
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["rejected"]) == (1, 1), "refused once: the client did not try again"
    assert f'refused_total{{code="{code}"}} 1.0'.encode() in gateway.process.metrics_text()
    return fenced


async def test_calls(gateway: Gateway) -> None:
    await refused(gateway, "calls_limit", calls=1)


async def test_tokens(gateway: Gateway) -> None:
    fenced = await refused(gateway, "tokens_limit", tokens=8)
    assert (fenced["prompt_tokens"], fenced["completion_tokens"]) == (4, 4)


async def test_tokens_of_a_frozen_model(gateway: Gateway) -> None:
    await refused(gateway, "frozen_tokens_limit", model="judge", frozen_tokens={"judge": 8})


async def test_a_frozen_model_that_reports_no_usage_is_estimated(gateway: Gateway) -> None:
    gateway.frozen.say(Plan(usage=False))
    await refused(gateway, "frozen_tokens_limit", model="judge", frozen_tokens={"judge": 8})


async def test_concurrent_calls(gateway: Gateway) -> None:
    opened = await gateway.open(limits={"concurrent_calls": 1})
    goes_on = asyncio.Event()
    gateway.policy.say(Plan(before=goes_on), Plan())
    first = asyncio.create_task(gateway.post(opened, chat()))
    await asyncio.wait_for(gateway.policy.arrived.wait(), 5)
    status, body = await gateway.post(opened, chat())
    assert (status, body["error"]["code"]) == (429, "concurrent_calls_limit")
    goes_on.set()
    assert (await first)[0] == 200
    assert (await gateway.post(opened, chat()))[0] == 200


@pytest.mark.parametrize(
    ("model", "limits"),
    [("policy", {"tokens": 100}), ("judge", {"tokens": 100}), ("judge", {"frozen_tokens": {"judge": 100}})],
)
async def test_tokens_hold_for_calls_at_the_same_time(gateway: Gateway, model: str, limits: dict[str, Any]) -> None:
    """What a call may generate is set aside for it; what it did not use comes back."""
    opened = await gateway.open(limits=limits)
    server = gateway.policy if model == "policy" else gateway.frozen
    goes_on = asyncio.Event()
    server.say(Plan(before=goes_on), Plan(before=goes_on), Plan())
    asked = chat(model=model, max_tokens=60)
    calls = [asyncio.create_task(gateway.post(opened, asked)) for _ in range(2)]
    await until(lambda: len(server.requests) == 2)
    assert [request["max_tokens"] for request in server.requests] == [60, 40]
    async with gateway.http.post(opened.base_url + "/v1/chat/completions", json=asked) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (429, "tokens_reserved")
        assert reply.headers["Retry-After"] == "1" and "x-should-retry" not in reply.headers
    goes_on.set()
    assert [(await call)[0] for call in calls] == [200, 200]
    assert (await gateway.post(opened, asked))[0] == 200
    assert server.requests[-1]["max_tokens"] == 60
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None
    assert session.attempt.reserved == 0 and not any(session.attempt.frozen_reserved.values())


async def test_calls_that_end_early_give_back_what_was_set_aside(gateway: Gateway) -> None:
    opened = await gateway.open(limits={"tokens": 100})
    gateway.policy.say(Plan(before=asyncio.Event()), Plan(status=500), Plan())
    call = asyncio.create_task(gateway.post(opened, chat(max_tokens=100)))
    await asyncio.wait_for(gateway.policy.arrived.wait(), 5)
    call.cancel()
    await asyncio.wait_for(gateway.left.wait(), 5)
    assert (await gateway.post(opened, chat(max_tokens=100)))[0] == 500
    assert (await gateway.post(opened, chat(max_tokens=100)))[0] == 200


async def begin_upload(gateway: Gateway, opened: Opened) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body never ends, as far as it goes."""
    url = URL(opened.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    writer.write(head.encode() + b"x" * 1000)
    return reader, writer


async def test_an_agent_that_floods_is_refused_before_its_bodies_are_read(gateway: Gateway) -> None:
    opened = await gateway.open(limits={"concurrent_calls": 2})
    session = gateway.process.registry.find(opened.attempt)
    assert session is not None
    uploads = [await begin_upload(gateway, opened) for _ in range(4)]
    await until(lambda: session.serving == 4)
    reader, writer = await begin_upload(gateway, opened)
    assert (await reader.readline()).split()[1] == b"429"
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["rejected"]) == (0, 1)
    for pending, _ in uploads:
        assert (await pending.readline()).split()[1] == b"410"
    for _, closing in (*uploads, (reader, writer)):
        closing.close()


@pytest.mark.parametrize("path", ["/rewards", "/v1/chat/completions"])
async def test_a_body_that_is_too_long_is_refused_before_it_is_read(start: Start, path: str) -> None:
    async with start(max_body_bytes=100_000) as gateway:
        opened = await gateway.open()
        status, body = await gateway.post(opened, b" " * 2_000_000, path)
        assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_bodies_in_flight_are_bounded_over_all_attempts(start: Start) -> None:
    """The next body is refused unread, by 503 and when to ask again; an attempt that holds its share by 429."""
    async with start(max_body_bytes=7_500, bodies_bytes=25_000) as gateway:
        body = orjson.dumps(chat(pad="x" * 3000))
        goes_on = asyncio.Event()
        gateway.policy.say(Plan(before=goes_on))
        attempts = [await gateway.open() for _ in range(5)]
        calls = [asyncio.create_task(gateway.post(opened, body)) for opened in attempts[:4] for _ in range(2)]
        await until(lambda: len(gateway.policy.requests) == 8)
        assert b"gateway_body_bytes 24" in gateway.process.metrics_text()
        status, answer = await gateway.post(attempts[0], body)
        assert (status, answer["error"]["code"]) == (429, "bodies_limit")
        async with gateway.http.post(attempts[4].base_url + "/v1/chat/completions", data=body) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (503, "gateway_busy")
            assert reply.headers["Retry-After"] == "1" and "x-should-retry" not in reply.headers
        goes_on.set()
        assert {(await call)[0] for call in calls} == {200}
        assert (await gateway.post(attempts[4], body))[0] == 200
        assert gateway.process.bodies.held == 0


async def test_an_announced_body_is_refused_before_it_is_read_and_holds_nothing(start: Start) -> None:
    async with start(max_body_bytes=2_000_000, bodies_bytes=2_000_000) as gateway:
        opened, other = await gateway.open(), await gateway.open()
        session = gateway.process.registry.find(opened.attempt)
        assert session is not None
        first = await begin_upload(gateway, opened)
        await until(lambda: gateway.process.bodies.held == 1000)
        assert (await gateway.post(other, chat()))[0] == 200, "what was announced and not sent is nobody's loss"
        gateway.process.bodies.held += 1_500_000
        reader, second = await begin_upload(gateway, other)
        assert b" 503 " in await asyncio.wait_for(reader.readline(), 5)
        gateway.process.bodies.held -= 1_500_000
        for writer in (first[1], second):
            writer.close()
        await until(lambda: gateway.process.bodies.held == 0)


SHAPES = {
    "texts": [f"{number:03x}" for number in range(20_000)],
    "numbers": [number + 0.5 for number in range(20_000)],
    "lists": [[f"{number:03x}"] for number in range(20_000)],
    "an object of many keys": {f"{number:x}": f"{number:x}" for number in range(22_000)},
    "objects": [{f"{number:x}": {}} for number in range(10_000)],
    "ASCII": "word, time: 12:00 " * 20_000,
    "Latin-1": "é" * 200_000,
    "Chinese": "中" * 100_000,
    "one wide character": "x" * 300_000 + "😀",
    "one wide text of two": ["x" * 2_000_000, "y" * 300_000 + "😀"],
}


def test_a_wide_character_widens_its_own_text_alone() -> None:
    plain = [{"role": "user", "content": "word, time: 12:00 " * 60} for _ in range(300)]
    marked = [*plain, {"role": "user", "content": "😀"}]
    without, with_one = (orjson.dumps(body) for body in (plain, marked))
    assert widening(without) == 0
    assert widening(with_one) < 1000 < len(with_one)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_body_takes_is_estimated_from_above(shape: str) -> None:
    raw = json.dumps(SHAPES[shape], separators=(",", ":")).encode()
    estimate = unfolding(raw) + widening(orjson.dumps(orjson.loads(raw)))
    tracemalloc.start()
    try:
        body = orjson.loads(raw)
        orjson.dumps(body)
        takes = tracemalloc.get_traced_memory()[0]
        del body
    finally:
        tracemalloc.stop()
    assert takes < 1.1 * estimate < 6 * takes


async def test_a_body_that_unfolds_counts_as_what_it_unfolds_into(start: Start) -> None:
    async with start(max_body_bytes=1_000_000, bodies_bytes=8_000_000) as gateway:
        opened = await gateway.open()
        unfolding = b'{"model":"policy","messages":[{"role":"user","content":[' + b"[]," * 30_000 + b"[]]}]}"
        status, answer = await gateway.post(opened, unfolding)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        zeros = b'{"model":"policy","messages":[{"role":"user","content":"' + b"0" * 900_000 + b'"}]}'
        assert (await gateway.post(opened, gzip.compress(zeros), **{"Content-Encoding": "gzip"}))[0] == 200
        assert gateway.process.bodies.held == 0
