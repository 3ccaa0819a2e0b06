"""Limits of an attempt: 429 in OpenAI's shape with a code that says which, never retried by a client, counted."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from yarl import URL

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
