"""Limits of an attempt: 429 in OpenAI's shape with a code that says which, never retried by a client, counted."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Gateway, chat
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
