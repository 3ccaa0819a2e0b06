"""Calls from end to end: what the model server is asked, what the agent gets, what is recorded."""

from __future__ import annotations

import json

import pytest

from tests.gateway.conftest import Gateway, chat
from tests.gateway.policy import Plan


async def test_a_unary_chat_call_is_captured_and_stripped(gateway: Gateway) -> None:
    opened = await gateway.open()
    reply = await opened.openai().chat.completions.create(**chat())
    assert reply.choices[0].message.content == "Hello"
    assert reply.model == "policy"
    raw = reply.model_dump_json()
    for name in ("token_ids", "weight_versions", "prompt_logprobs"):
        assert name not in raw
    assert reply.choices[0].logprobs is None
    sent = gateway.policy.requests[0]
    assert sent["logprobs"] is True and sent["return_token_ids"] is True and sent["return_weight_versions"] is True
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (1.0, 1, -1)
    record = gateway.records[0]
    assert record.prompt_token_ids.tolist() == [1, 2, 3, 4]
    assert record.choices[0].token_ids.tolist() == [11, 12, 13, 2]
    assert record.choices[0].logprobs.tolist() == [-0.5, -0.25, -1.0, -0.125]
    assert [(span.version, span.start, span.end) for span in record.choices[0].versions] == [("1.0", 0, 4)]
    assert (record.outcome, record.seq, record.trained, record.status) == ("ok", 1, True, 200)
    assert record.messages == ({"role": "user", "content": "Say hello."},)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_is_captured_like_the_whole_reply(gateway: Gateway, path: str) -> None:
    opened = await gateway.open()
    body = chat() if "chat" in path else {"model": "policy", "prompt": "Say hello."}
    status, _ = await gateway.post(opened, body, path)
    assert status == 200
    async with gateway.http.post(opened.base_url + path, json={**body, "stream": True}) as reply:
        text = (await reply.read()).decode()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert text.endswith("data: [DONE]\n\n")
    assert "token_ids" not in text and "logprob" not in text and "weight_versions" not in text
    assert all(event["choices"] for event in events), "no usage chunk was asked for"
    one, other = await gateway.until_recorded(2)
    assert one.choices[0].token_ids.tolist() == other.choices[0].token_ids.tolist() == [11, 12, 13, 2]
    assert one.choices[0].logprobs.tolist() == other.choices[0].logprobs.tolist()
    assert one.choices[0].versions == other.choices[0].versions
    assert one.prompt_token_ids.tolist() == other.prompt_token_ids.tolist() == [1, 2, 3, 4]
    assert (one.prompt_tokens, one.completion_tokens) == (other.prompt_tokens, other.completion_tokens) == (4, 4)
    if "chat" in path:
        assert other.choices[0].message == {"role": "assistant", "content": "Hello"}
    else:
        assert one.choices[0].text == other.choices[0].text == "Hello"


async def test_fence_and_end_close_an_attempt(gateway: Gateway) -> None:
    opened = await gateway.open()
    await opened.openai().chat.completions.create(**chat())
    fenced = await gateway.fence(opened)
    assert fenced["n_calls"] == 1 and fenced["lost"] is None and fenced["last_message"] == "Hello"
    assert gateway.collector.spans == 1
    status, body = await gateway.post(opened, chat())
    assert (status, body["error"]["code"]) == (410, "attempt_closed")
    end = {"outcome": "Succeeded", "reward": 1.0, "reward_source": "builtin"}
    status, ended = await gateway.admin("POST", f"/admin/v1/attempts/{opened.attempt}/end", end)
    assert status == 200 and ended["digest"] == fenced["digest"]
    assert gateway.collector.spans == 2


async def test_plan_is_used(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(n=2))
    reply = await opened.openai().chat.completions.create(**chat(n=2))
    assert len(reply.choices) == 2
    assert [choice.token_ids.tolist() for choice in gateway.records[0].choices] == [[11, 12, 13, 2]] * 2
