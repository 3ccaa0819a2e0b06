"""Streams: live, stripped, broken off by either side."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.gateway.conftest import Gateway, Opened, chat
from tests.gateway.policy import Plan
from tests.gateway.test_calls import CALL


async def raw_stream(gateway: Gateway, opened: Opened, path: str = "/v1/chat/completions", **body: Any) -> str:
    whole = {**(chat() if "chat" in path else {"model": "policy", "prompt": "hi"}), "stream": True, **body}
    async with gateway.http.post(opened.base_url + path, json=whole) as reply:
        assert reply.status == 200 and reply.headers["Content-Type"] == "text/event-stream"
        return (await reply.read()).decode()


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_is_captured_like_the_whole_reply(gateway: Gateway, path: str) -> None:
    opened = await gateway.open()
    body = chat() if "chat" in path else {"model": "policy", "prompt": "hi"}
    status, _ = await gateway.post(opened, body, path)
    assert status == 200
    text = await raw_stream(gateway, opened, path)
    assert text.endswith("data: [DONE]\n\n")
    for hidden in ("token_ids", "logprob", "weight_versions", "usage"):
        assert hidden not in text
    assert all(event["choices"] for event in events_of(text)), "no usage chunk was asked for"
    one, other = await gateway.until_recorded(2)
    assert one.choices[0].token_ids.tolist() == other.choices[0].token_ids.tolist() == [11, 12, 13, 2]
    assert one.choices[0].logprobs.tolist() == other.choices[0].logprobs.tolist()
    assert one.choices[0].versions == other.choices[0].versions != ()
    assert one.prompt_token_ids.tolist() == other.prompt_token_ids.tolist() == [1, 2, 3, 4]
    assert (one.prompt_tokens, one.completion_tokens) == (other.prompt_tokens, other.completion_tokens) == (4, 4)
    assert (other.streamed, other.outcome) == (True, "ok") and other.first_chunk_unix_nano is not None
    if "chat" in path:
        assert other.choices[0].message == {"role": "assistant", "content": "Hello"}
    else:
        assert one.choices[0].text == other.choices[0].text == "Hello"


async def test_chunks_arrive_while_the_model_server_still_generates(gateway: Gateway) -> None:
    opened = await gateway.open()
    goes_on = asyncio.Event()

    async def between(number: int) -> None:
        if number == 2:
            await goes_on.wait()

    gateway.policy.say(Plan(between=between))
    stream = await opened.stream()
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].delta.role == "assistant"
    assert (await anext(chunks)).choices[0].delta.content == "Hel"
    assert not gateway.records
    goes_on.set()
    rest = [chunk.choices[0].delta.content async for chunk in chunks]
    assert rest == ["lo"], "the chunk that held only an id is dropped"


async def test_usage_and_logprobs_where_they_were_asked_for(gateway: Gateway) -> None:
    opened = await gateway.open()
    text = await raw_stream(gateway, opened, logprobs=True, stream_options={"include_usage": True})
    events = events_of(text)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
    assert "logprobs" in text and "token_ids" not in text
    text = await raw_stream(gateway, opened, return_token_ids=True)
    events = events_of(text)
    assert events[0]["prompt_token_ids"] == [1, 2, 3, 4]
    assert [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])] == [
        11,
        12,
        13,
        2,
    ]


async def test_the_clients_stream_helper_reads_tool_calls(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(tool_call=CALL))
    async with opened.openai().chat.completions.stream(**chat()) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.name == "add"
    assert (await gateway.until_recorded(1))[0].choices[0].tool_calls == 1


async def test_several_choices_in_a_stream(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(n=2))
    await raw_stream(gateway, opened, n=2)
    (record,) = await gateway.until_recorded(1)
    assert [choice.token_ids.tolist() for choice in record.choices] == [[11, 12, 13, 2]] * 2


async def test_an_agent_that_goes_away_aborts_the_generation(gateway: Gateway) -> None:
    opened = await gateway.open()

    async def between(number: int) -> None:
        if number == 2:
            await asyncio.Event().wait()

    gateway.policy.say(Plan(between=between))
    stream = await opened.stream()
    await anext(aiter(stream))
    await stream.close()
    await asyncio.wait_for(gateway.policy.aborted.wait(), 5)
    (record,) = await gateway.until_recorded(1)
    assert (record.outcome, record.error) == ("cancelled", "the agent went away")
    assert record.choices[0].token_ids.tolist() == [11]
    assert (await gateway.fence(opened))["calls"]["cancelled"] == 1


async def test_an_agent_that_times_out_before_the_reply_aborts_it_too(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(before=asyncio.Event()))
    with pytest.raises(openai.APITimeoutError):
        await opened.openai(timeout=0.1).chat.completions.create(**chat())
    await asyncio.wait_for(gateway.policy.aborted.wait(), 5)
    (record,) = await gateway.until_recorded(1)
    assert (record.outcome, record.status) == ("cancelled", None)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (Plan(break_after=2), "the model server's stream broke off"),
        (Plan(error_after=2), "the model server's stream failed: engine died"),
    ],
)
async def test_a_stream_that_breaks_is_an_error_for_the_agent_and_failed(
    gateway: Gateway, plan: Plan, error: str
) -> None:
    opened = await gateway.open()
    gateway.policy.say(plan)
    pieces = []
    with pytest.raises(openai.APIError):
        async for chunk in await opened.stream():
            pieces.append(chunk.choices[0].delta.content)
    assert pieces == ["", "Hel"]
    (record,) = await gateway.until_recorded(1)
    assert record.outcome == "failed" and record.error is not None and record.error.startswith(error)


async def test_a_stream_without_ids_is_not_free(gateway: Gateway) -> None:
    opened = await gateway.open()

    async def between(number: int) -> None:
        if number == 3:
            await asyncio.Event().wait()

    gateway.frozen.say(Plan(between=between, usage=False))
    stream = await opened.stream(model="judge")
    chunks = aiter(stream)
    for _ in range(2):
        await anext(chunks)
    await stream.close()
    (record,) = await gateway.until_recorded(1)
    assert record.completion_tokens and record.prompt_tokens
