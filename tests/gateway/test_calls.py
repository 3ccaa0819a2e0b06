"""Calls from end to end: what the model server is asked, what the agent gets, what is recorded."""

from __future__ import annotations

import asyncio
import gzip

import openai
import orjson
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kitestring_rollout.gateway.errors import MAX_MESSAGE
from kitestring_rollout.traces.conventions import CONTENTS_OMITTED
from kitestring_rollout.traces.records import UNREACHABLE
from tests.gateway.conftest import Gateway, Start, chat, until
from tests.gateway.policy import Plan, Policy

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def test_a_unary_chat_call_is_captured_and_stripped(gateway: Gateway) -> None:
    opened = await gateway.open()
    reply = await opened.openai().chat.completions.create(**chat(), extra_headers={"X-Kitestring-Agent": "planner"})
    assert reply.choices[0].message.content == "Hello"
    assert reply.model == "policy" and reply.usage is not None and reply.usage.total_tokens == 8
    raw = reply.model_dump_json()
    for name in ("token_ids", "weight_versions", "prompt_logprobs"):
        assert name not in raw
    assert reply.choices[0].logprobs is None
    sent = gateway.policy.requests[0]
    assert (sent["logprobs"], sent["return_token_ids"], sent["return_weight_versions"]) == (True, True, True)
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (1.0, 1, -1)
    record = gateway.records[0]
    assert record.prompt_token_ids.tolist() == [1, 2, 3, 4]
    assert record.choices[0].token_ids.tolist() == [11, 12, 13, 2]
    assert record.choices[0].logprobs.tolist() == [-0.5, -0.25, -1.0, -0.125]
    assert [(span.version, span.start, span.end) for span in record.choices[0].versions] == [("1.0", 0, 4)]
    assert (record.outcome, record.seq, record.trained, record.status) == ("ok", 1, True, 200)
    assert (record.agent, record.model, record.requested_model) == ("planner", "policy", "policy")
    assert record.messages == ({"role": "user", "content": "Say hello."},)


async def test_the_agents_credentials_never_reach_a_model_server(gateway: Gateway) -> None:
    opened = await gateway.open()
    await opened.openai().chat.completions.create(**chat(), extra_headers={"X-Secret": "s"})
    await opened.openai().chat.completions.create(**chat(model="judge"))
    for headers in (*gateway.policy.headers, *gateway.frozen.headers):
        assert opened.token not in str(headers) and "X-Secret" not in headers
    assert "Authorization" not in gateway.policy.headers[0]
    assert gateway.frozen.headers[0]["Authorization"] == "Bearer frozen-key"


async def test_choices_tools_and_logprobs_pass(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(n=2, tool_call=CALL))
    reply = await opened.openai().chat.completions.create(
        **chat(n=2, tools=TOOLS, tool_choice="auto", stop=["x"], seed=7, logprobs=True)
    )
    assert [choice.message.tool_calls[0].id for choice in reply.choices if choice.message.tool_calls] == ["call_1"] * 2
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[1].logprob == -0.25
    sent = gateway.policy.requests[0]
    assert (sent["n"], sent["tools"], sent["tool_choice"], sent["stop"], sent["seed"]) == (2, TOOLS, "auto", ["x"], 7)
    record = gateway.records[0]
    assert [choice.token_ids.tolist() for choice in record.choices] == [[11, 12, 13, 2]] * 2
    assert record.tools == tuple(TOOLS) and record.choices[1].tool_calls == 1
    assert record.sampling["seed"] == 7 and record.sampling["stop"] == ["x"]


async def test_a_frozen_model_is_routed_by_name_and_never_trained(gateway: Gateway) -> None:
    opened = await gateway.open()
    await opened.openai().chat.completions.create(**chat(model="judge", temperature=0.3))
    assert gateway.frozen.paths == ["/api/v1/chat/completions"] and not gateway.policy.requests
    assert gateway.frozen.requests[0]["model"] == "big-judge" and gateway.frozen.requests[0]["temperature"] == 0.3
    assert "return_token_ids" not in gateway.frozen.requests[0]
    record = gateway.records[0]
    assert (record.trained, record.model, record.completion_tokens) == (False, "judge", 4)
    assert len(record.choices[0].token_ids) == 0 and record.choices[0].message is not None


async def test_aliases_and_unknown_models(gateway: Gateway) -> None:
    opened = await gateway.open()
    client = opened.openai()
    reply = await client.chat.completions.create(**chat(model="gpt-4o-mini"))
    assert reply.model == "gpt-4o-mini"
    assert (gateway.records[0].model, gateway.records[0].requested_model) == ("policy", "gpt-4o-mini")
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-7'") as caught:
        await client.chat.completions.create(**chat(model="gpt-7"))
    assert caught.value.code == "model_not_found"
    status, body = await gateway.post(opened, {"messages": [{"role": "user", "content": "x"}]})
    assert (status, body["error"]["code"]) == (400, "model_missing")
    listed = await client.models.list()
    assert {model.id for model in listed.data} == {"policy", "gpt-4o-mini", "judge"}
    assert (await client.models.retrieve("judge")).id == "judge"
    assert len(gateway.policy.requests) == 1


async def test_nonconforming_calls_are_flagged_or_refused(start: Start) -> None:
    async with start() as gateway:
        opened = await gateway.open()
        await opened.openai().chat.completions.create(**chat(temperature=0.1, top_p=0.5))
        assert gateway.policy.requests[0]["temperature"] == 1.0 and gateway.policy.requests[0]["top_p"] == 1
        assert gateway.records[0].nonconforming == ("temperature", "top_p")
        assert (await gateway.fence(opened))["calls"]["nonconforming"] == 1
    async with start(sampling={"nonconforming": "refuse"}) as gateway:
        opened = await gateway.open()
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await opened.openai(max_retries=2).chat.completions.create(**chat(temperature=0.1))
        fenced = await gateway.fence(opened)
        assert (fenced["n_calls"], fenced["calls"]["rejected"]) == (0, 1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(ids=False),
        Plan(prompt_ids=None),
        Plan(versions=False),
        Plan(pieces=[("Hello", [11, 12], [-0.5, -9999.0])]),
    ],
)
async def test_a_reply_that_cannot_be_trained_on_is_served_recorded_and_counted(gateway: Gateway, plan: Plan) -> None:
    opened = await gateway.open()
    gateway.policy.say(plan)
    reply = await opened.openai().chat.completions.create(**chat())
    assert reply.choices[0].message.content == "Hello"
    assert gateway.records[0].outcome == "ok"
    assert b"kitestring_gateway_untrainable_total 1.0" in gateway.process.metrics_text()


async def test_a_version_header_stands_for_the_whole_reply(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.policy.say(Plan(versions=False, header_version="2.5"))
    await opened.openai().chat.completions.create(**chat())
    assert [(span.version, span.start, span.end) for span in gateway.records[0].choices[0].versions] == [("2.5", 0, 4)]


async def test_errors_of_the_model_server_are_passed_on_and_recorded(gateway: Gateway) -> None:
    opened = await gateway.open()
    client = opened.openai()
    gateway.policy.say(
        Plan(
            status=400, body=b'{"error": {"message": "too long: 600 tokens", "type": "BadRequestError", "code": 400}}'
        ),
        Plan(status=400, body=b'{"object": "error", "message": "old shape", "type": "BadRequestError", "code": 400}'),
        Plan(status=500, body=b"<html>"),
        Plan(body=b"not json"),
        Plan(body=b'{"choices": ["x"]}'),
        Plan(status=302),
        Plan(break_after=0),
    )
    with pytest.raises(openai.BadRequestError, match="too long: 600 tokens"):
        await client.chat.completions.create(**chat())
    with pytest.raises(openai.BadRequestError, match="old shape"):
        await client.chat.completions.create(**chat())
    for _ in range(5):
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**chat())
    assert [record.outcome for record in gateway.records] == ["failed"] * 7
    assert [record.status for record in gateway.records] == [400, 400, 500, 502, 502, 502, 502]
    fenced = await gateway.fence(opened)
    assert (fenced["n_calls"], fenced["calls"]["failed"], fenced["calls"]["rejected"]) == (7, 7, 0)


@pytest.mark.parametrize("size", [20_000, 1_000_000])
async def test_an_error_that_echoes_the_request_is_cut(gateway: Gateway, size: int) -> None:
    gateway.policy.say(Plan(status=400, body=orjson.dumps({"error": {"message": "stop is wrong: " + "x" * size}})))
    opened = await gateway.open()
    status, answer = await gateway.post(opened, chat())
    assert status == 400
    (record,) = gateway.records
    for message in (answer["error"]["message"], record.error):
        assert "stop is wrong: xxxx" in message and len(message) < MAX_MESSAGE + 100


async def test_a_request_too_large_to_be_recorded_is_served_and_its_attempt_complete(gateway: Gateway) -> None:
    opened = await gateway.open()
    large = chat(messages=[{"role": "user", "content": "\x80" * (9 << 20)}])
    assert (await gateway.post(opened, orjson.dumps(large)))[0] == 200
    assert (await gateway.fence(opened))["lost"] is None
    (request,) = gateway.collector.trusted
    assert request.ByteSize() < 4096 and CONTENTS_OMITTED in str(request)


async def test_a_frozen_endpoints_refusal_of_our_key_is_not_shown(gateway: Gateway) -> None:
    opened = await gateway.open()
    gateway.frozen.say(Plan(status=401, body=b'{"error": {"message": "Incorrect API key: frozen-key"}}'))
    with pytest.raises(openai.InternalServerError) as caught:
        await opened.openai().chat.completions.create(**chat(model="judge"))
    assert "frozen-key" not in str(caught.value)
    gateway.frozen.say(Plan(status=429, retry_after="7"))
    with pytest.raises(openai.RateLimitError) as limited:
        await opened.openai().chat.completions.create(**chat(model="judge"))
    assert limited.value.response.headers["Retry-After"] == "7"


async def test_a_server_that_is_down_gives_502_and_one_that_comes_up_is_waited_for(
    start: Start, unused_tcp_port: int
) -> None:
    from aiohttp.test_utils import TestServer

    late = Policy()
    server = TestServer(late.app, port=unused_tcp_port)
    policies = [{"name": "policy", "servers": [f"http://127.0.0.1:{unused_tcp_port}"]}]
    async with start(policies=policies, connect_seconds=0.3) as gateway:
        opened = await gateway.open()
        with pytest.raises(openai.InternalServerError, match="no server of model 'policy' can be reached"):
            await opened.openai().chat.completions.create(**chat())
        assert (gateway.records[0].outcome, gateway.records[0].status) == ("failed", 502)
        assert (gateway.records[0].error or "").startswith(f"{UNREACHABLE}: no server of model 'policy'")
    async with start(policies=policies, connect_seconds=10) as gateway:
        opened = await gateway.open()
        call = asyncio.create_task(opened.openai().chat.completions.create(**chat()))
        gate = gateway.process.gates.find("policy")
        await until(lambda: gate is not None and gate.generating > 0)
        await server.start_server()
        try:
            assert (await call).choices[0].message.content == "Hello"
        finally:
            await server.close()


async def test_another_replica_is_tried_when_one_is_down(start: Start, unused_tcp_port: int) -> None:
    from aiohttp.test_utils import TestServer

    replica = Policy()
    async with TestServer(replica.app) as server:
        servers = [f"http://127.0.0.1:{unused_tcp_port}", str(server.make_url(""))]
        async with start(policies=[{"name": "policy", "servers": servers}]) as gateway:
            for _ in range(4):
                opened = await gateway.open()
                await opened.openai().chat.completions.create(**chat())
    assert len(replica.requests) == 4


async def test_the_record_of_contents_can_be_left_out(start: Start) -> None:
    async with start(record_contents=False) as gateway:
        opened = await gateway.open()
        await opened.openai().chat.completions.create(**chat())
        await gateway.fence(opened)
        assert gateway.collector.spans == 1
        assert b"Say hello." not in gateway.collector.trusted[0].SerializeToString()


async def test_a_large_upload_that_waits_for_100_continue_is_taken(gateway: Gateway) -> None:
    opened = await gateway.open()
    body = chat(messages=[{"role": "user", "content": "x" * 300_000}])
    async with gateway.http.post(f"{opened.base_url}/v1/chat/completions", json=body, expect100=True) as reply:
        assert reply.status == 200


async def test_a_compressed_body_is_taken_within_the_limit(start: Start) -> None:
    async with start(max_body_bytes=10_000) as gateway:
        opened = await gateway.open()
        encoded = {"Content-Encoding": "gzip"}
        status, _ = await gateway.post(opened, gzip.compress(orjson.dumps(chat())), **encoded)
        assert status == 200 and gateway.policy.requests[0]["messages"] == chat()["messages"]
        status, body = await gateway.post(opened, gzip.compress(b" " * 1_000_000), **encoded)
        assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_a_body_over_the_limit_is_413(start: Start) -> None:
    async with start(max_body_bytes=10_000) as gateway:
        opened = await gateway.open()
        status, body = await gateway.post(opened, chat(messages=[{"role": "user", "content": "x" * 20_000}]))
        assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_the_synchronous_client_is_served_too(gateway: Gateway) -> None:
    opened = await gateway.open()

    def use() -> tuple[str | None, list[str | None], str]:
        with openai.OpenAI(base_url=f"{opened.base_url}/v1", api_key="anything") as client:
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
            whole = client.chat.completions.create(model="policy", messages=messages)
            stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
            pieces = [chunk.choices[0].delta.content for chunk in stream]
            completion = client.completions.create(model="policy", prompt=[1, 2, 3])
            return whole.choices[0].message.content, pieces, completion.choices[0].text

    assert await asyncio.to_thread(use) == ("Hello", ["", "Hel", "lo"], "Hello")
    assert [(record.api, record.streamed) for record in await gateway.until_recorded(3)] == [
        ("chat", False),
        ("chat", True),
        ("completions", False),
    ]
