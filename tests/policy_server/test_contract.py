"""What gateway and trainer may expect of any policy server: ours and the real vLLM pass the same suite."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_endpoint import QUESTION, TOOLS, Endpoint
from tiny_policy import TOOL_CALL
from transformers import AutoModelForCausalLM, AutoTokenizer

EXACT = {"return_token_ids": True, "logprobs": True}
"""What the gateway adds to a chat request of a training run."""
GENERATED = "vllm:generation_tokens_total"


@lru_cache
def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache
def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def _reference(folder: Path, prompt: list[int], reply: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of the reply's tokens by one plain forward pass over all ids."""
    with torch.inference_mode():
        logits = _model(folder)(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(reply).unsqueeze(1)).squeeze(1)


def _check(endpoint: Endpoint, prompt: list[int], reply: list[int], logprobs: list[float], **how: Any) -> None:
    expected = _reference(how.pop("folder", endpoint.folder), prompt, reply, **how)
    assert len(logprobs) == len(reply)
    assert float((torch.tensor(logprobs) - expected).abs().max()) <= endpoint.tolerance


def _chat_logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


# --- what is served -----------------------------------------------------------------------------------------------


async def test_serves_its_model(endpoint: Endpoint) -> None:
    assert (await endpoint.get("/health")).status == 200
    models = (await endpoint.get("/v1/models")).body
    assert models["object"] == "list"
    (card,) = models["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("policy", "model", endpoint.max_model_len)


async def test_counts_tokens(endpoint: Endpoint) -> None:
    before = [await endpoint.metric(f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
    body = await endpoint.chat(max_tokens=5, ignore_eos=True)
    after = [await endpoint.metric(f"vllm:{name}_tokens_total") for name in ("prompt", "generation")]
    assert after == [before[0] + body["usage"]["prompt_tokens"], before[1] + 5]
    assert await endpoint.metric("vllm:num_requests_running") == 0
    assert await endpoint.metric("vllm:num_requests_waiting") == 0


# --- chat, unary --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_chat_reports_the_ids_and_logprobs_it_sampled(endpoint: Endpoint, temperature: float) -> None:
    body = await endpoint.chat(temperature=temperature, max_tokens=24, seed=7, ignore_eos=True, **EXACT)
    tokenizer = _tokenizer(endpoint.folder)
    prompt = body["prompt_token_ids"]
    assert prompt == tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["token_ids"]) == 24
    assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    _check(endpoint, prompt, choice["token_ids"], _chat_logprobs(choice), temperature=temperature)
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["total_tokens"] == len(prompt) + 24
    assert body["model"] == "policy"
    assert body["object"] == "chat.completion"


async def test_ids_and_logprobs_come_only_when_asked_for(endpoint: Endpoint) -> None:
    body = await endpoint.chat(max_tokens=3)
    assert body.get("prompt_token_ids") is None
    assert body["choices"][0].get("token_ids") is None
    assert body["choices"][0]["logprobs"] is None


async def test_greedy_takes_the_most_likely_token_and_ends_at_the_end_of_text(endpoint: Endpoint) -> None:
    body = await endpoint.chat(temperature=0, **EXACT)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == TOOL_CALL
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    tokenizer = _tokenizer(endpoint.folder)
    assert choice["token_ids"] == tokenizer.encode(TOOL_CALL + "<|im_end|>")
    _check(endpoint, body["prompt_token_ids"], choice["token_ids"], _chat_logprobs(choice))


async def test_top_logprobs_are_the_most_likely_tokens(endpoint: Endpoint) -> None:
    body = await endpoint.chat(temperature=0, max_tokens=4, top_logprobs=3, **EXACT)
    (choice,) = body["choices"]
    prompt, reply = body["prompt_token_ids"], choice["token_ids"]
    with torch.inference_mode():
        logits = _model(endpoint.folder)(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).topk(3, dim=-1).values
    found = torch.tensor([[top["logprob"] for top in e["top_logprobs"]] for e in choice["logprobs"]["content"]])
    assert found.shape == (4, 3)
    # Compared as probabilities: far down the tail, float32 noise is larger than the tolerance for what is sampled.
    assert float((found.exp() - expected.exp()).abs().max()) <= endpoint.tolerance


async def test_seed_repeats_a_reply(endpoint: Endpoint) -> None:
    asked = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    first, again, other = [(await endpoint.chat(seed=s, **asked))["choices"][0]["token_ids"] for s in (11, 11, 12)]
    assert first == again
    assert first != other


async def test_n_gives_independent_choices(endpoint: Endpoint) -> None:
    body = await endpoint.chat(n=3, temperature=1.0, max_tokens=24, seed=3, ignore_eos=True, **EXACT)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) == 3
    for choice in body["choices"]:
        _check(endpoint, body["prompt_token_ids"], choice["token_ids"], _chat_logprobs(choice))
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])
    assert body["usage"]["completion_tokens"] == 72


async def test_many_at_once_each_agree_with_a_plain_forward_pass(endpoint: Endpoint) -> None:
    async def one(number: int) -> None:
        messages = [{"role": "user", "content": "How many pears? " * (number % 5 + 1)}]
        body = await endpoint.chat(messages=messages, max_tokens=8 + number, seed=number, ignore_eos=True, **EXACT)
        (choice,) = body["choices"]
        assert len(choice["token_ids"]) == 8 + number
        _check(endpoint, body["prompt_token_ids"], choice["token_ids"], _chat_logprobs(choice))

    await asyncio.gather(*(one(number) for number in range(24)))


# --- stop ---------------------------------------------------------------------------------------------------------


async def test_stop_string_ends_the_text_before_it(endpoint: Endpoint) -> None:
    body = await endpoint.chat(temperature=0, stop=["nowhere", 'tor","arg'], **EXACT)
    (choice,) = body["choices"]
    before = TOOL_CALL[: TOOL_CALL.index('tor","arg')]
    assert choice["message"]["content"] == before
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == 'tor","arg'
    # The ids go on to the token that completed the stop string.
    text = _tokenizer(endpoint.folder).decode(choice["token_ids"])
    assert text == TOOL_CALL[: len(text)]
    assert len(text) >= len(before) + len('tor","arg')


# --- streaming ----------------------------------------------------------------------------------------------------


async def test_stream_says_what_the_unary_reply_says(endpoint: Endpoint) -> None:
    asked = {"messages": QUESTION, "temperature": 0, **EXACT}
    unary = await endpoint.chat(**asked)
    stream = await endpoint.stream("/v1/chat/completions", stream_options={"include_usage": True}, **asked)
    assert stream.done
    first, *rest = stream.chunks
    assert first["prompt_token_ids"] == unary["prompt_token_ids"]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert all(chunk.get("prompt_token_ids") is None for chunk in rest)
    assert {chunk["object"] for chunk in stream.chunks} == {"chat.completion.chunk"}
    (choice,) = unary["choices"]
    assert stream.content[0] == choice["message"]["content"]
    assert stream.token_ids[0] == choice["token_ids"]
    assert stream.logprobs[0] == pytest.approx(_chat_logprobs(choice), abs=endpoint.tolerance)
    assert stream.finish_reason == {0: "stop"}
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == len(choice["token_ids"])
    assert stream.chunks[-1]["choices"] == []
    # Live: the reply comes in several chunks.
    assert sum(1 for chunk in stream.chunks if chunk["choices"] and chunk["choices"][0].get("token_ids")) > 2


async def test_stream_with_choices_and_without_usage(endpoint: Endpoint) -> None:
    asked = {"n": 2, "temperature": 1.0, "max_tokens": 10, "seed": 5, "ignore_eos": True, **EXACT}
    stream = await endpoint.stream("/v1/chat/completions", messages=QUESTION, **asked)
    assert stream.usage is None
    assert stream.finish_reason == {0: "length", 1: "length"}
    prompt = stream.chunks[0]["prompt_token_ids"]
    for index in (0, 1):
        assert len(stream.token_ids[index]) == 10
        _check(endpoint, prompt, stream.token_ids[index], stream.logprobs[index])


async def test_stream_never_breaks_a_character(endpoint: Endpoint) -> None:
    # Random bytes for the most part: each text must be what decoding all of its ids gives.
    asked = {"n": 4, "temperature": 1.5, "max_tokens": 60, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    stream = await endpoint.stream("/v1/chat/completions", messages=QUESTION, **asked)
    tokenizer = _tokenizer(endpoint.folder)
    for index in range(4):
        decoded = tokenizer.decode(stream.token_ids[index], skip_special_tokens=True)
        text = stream.content[index]
        # vLLM leaves out bytes at the very end that are no character yet.
        assert decoded.rstrip("�").startswith(text.rstrip("�"))
        assert len(decoded) - len(text) <= 3


async def test_stream_with_stop_string_holds_back_its_beginning(endpoint: Endpoint) -> None:
    stop = 'tor","arg'
    stream = await endpoint.stream("/v1/chat/completions", messages=QUESTION, temperature=0, stop=stop, **EXACT)
    assert stream.content[0] == TOOL_CALL[: TOOL_CALL.index(stop)]
    assert stream.finish_reason == {0: "stop"}


# --- tools --------------------------------------------------------------------------------------------------------


async def test_tool_call(endpoint: Endpoint) -> None:
    body = await endpoint.chat(temperature=0, tools=TOOLS, tool_choice="auto", **EXACT)
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["id"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "calculator"
    assert json.loads(call["function"]["arguments"]) == {"x": 48}
    assert not choice["message"]["content"]
    assert choice["finish_reason"] == "tool_calls"
    tokenizer = _tokenizer(endpoint.folder)
    assert choice["token_ids"] == tokenizer.encode(TOOL_CALL + "<|im_end|>")
    rendered = tokenizer.apply_chat_template(QUESTION, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert body["prompt_token_ids"] == rendered
    _check(endpoint, rendered, choice["token_ids"], _chat_logprobs(choice))


async def test_tool_call_streamed(endpoint: Endpoint) -> None:
    stream = await endpoint.stream("/v1/chat/completions", messages=QUESTION, temperature=0, tools=TOOLS, **EXACT)
    (call,) = stream.tool_calls[0]
    assert call["id"]
    assert call["function"]["name"] == "calculator"
    assert json.loads(call["function"]["arguments"]) == {"x": 48}
    assert stream.content[0] == ""
    assert stream.finish_reason == {0: "tool_calls"}
    assert stream.token_ids[0] == _tokenizer(endpoint.folder).encode(TOOL_CALL + "<|im_end|>")
    assert len(stream.logprobs[0]) == len(stream.token_ids[0])
    # The ids arrive while the call is being held back.
    assert sum(1 for chunk in stream.chunks if chunk["choices"] and chunk["choices"][0].get("token_ids")) > 2


async def test_tool_choice_none_leaves_the_text_alone(endpoint: Endpoint) -> None:
    (choice,) = (await endpoint.chat(temperature=0, tools=TOOLS, tool_choice="none"))["choices"]
    assert choice["message"]["content"] == TOOL_CALL
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "stop"


async def test_next_turn_extends_the_last_by_exact_ids(endpoint: Endpoint) -> None:
    first = await endpoint.chat(temperature=0, tools=TOOLS, **EXACT)
    message = first["choices"][0]["message"]
    call = message["tool_calls"][0]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]},
        {"role": "tool", "tool_call_id": call["id"], "content": "144"},
    ]
    second = await endpoint.chat(messages=messages, temperature=0, max_tokens=4, tools=TOOLS, **EXACT)
    so_far = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(so_far)] == so_far


async def test_content_may_come_in_text_parts(endpoint: Endpoint) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "How many"}, {"type": "text", "text": "pears?"}]}]
    body = await endpoint.chat(messages=parts, max_tokens=1, return_token_ids=True)
    whole = [{"role": "user", "content": "How many\npears?"}]
    rendered = _tokenizer(endpoint.folder).apply_chat_template(whole, add_generation_prompt=True, return_dict=False)
    assert body["prompt_token_ids"] == rendered


# --- completions --------------------------------------------------------------------------------------------------


async def test_completion_takes_ids_and_gives_ids(endpoint: Endpoint) -> None:
    prompt = _tokenizer(endpoint.folder).encode("There are 48 boxes")
    asked = {"max_tokens": 12, "seed": 2, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    body = await endpoint.complete(prompt=prompt, **asked)
    (choice,) = body["choices"]
    assert body["object"] == "text_completion"
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 12
    _check(endpoint, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 12
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 12


async def test_completion_takes_text(endpoint: Endpoint) -> None:
    body = await endpoint.complete(prompt="There are 48 boxes", max_tokens=2, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == _tokenizer(endpoint.folder).encode("There are 48 boxes")
    assert choice["logprobs"] is None


async def test_completion_streams(endpoint: Endpoint) -> None:
    prompt = _tokenizer(endpoint.folder).encode("There are 48 boxes")
    asked = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    asked |= {"logprobs": 1, "return_token_ids": True}
    unary = (await endpoint.complete(**asked))["choices"][0]
    stream = await endpoint.stream("/v1/completions", stream_options={"include_usage": True}, **asked)
    assert stream.chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert all(not c["choices"] or c["choices"][0].get("prompt_token_ids") is None for c in stream.chunks[1:])
    assert stream.token_ids[0] == unary["token_ids"]
    assert stream.content[0] == unary["text"]
    assert stream.logprobs[0] == pytest.approx(unary["logprobs"]["token_logprobs"], abs=endpoint.tolerance)
    assert stream.finish_reason == {0: "length"}
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == 12


# --- refusals -----------------------------------------------------------------------------------------------------


def _error(body: Any, code: int) -> str:
    assert set(body) == {"error"}
    assert body["error"]["code"] == code
    assert body["error"]["type"]
    return str(body["error"]["message"])


async def test_unknown_model_is_404(endpoint: Endpoint) -> None:
    for path, field in (("/v1/chat/completions", {"messages": QUESTION}), ("/v1/completions", {"prompt": "x"})):
        reply = await endpoint.post(path, {"model": "other", **field})
        assert reply.status == 404
        assert "other" in _error(reply.body, 404)


async def test_context_overflow_is_400_and_names_the_limit(endpoint: Endpoint) -> None:
    most = endpoint.max_model_len
    messages = [{"role": "user", "content": "12 " * most}]
    for body in (
        {"messages": messages},
        {"messages": QUESTION, "max_tokens": most + 1},
    ):
        reply = await endpoint.post("/v1/chat/completions", {"model": "policy", **body})
        assert reply.status == 400, reply
        assert str(most) in _error(reply.body, 400)
    reply = await endpoint.post("/v1/completions", {"model": "policy", "prompt": [1] * (most + 5), "max_tokens": 1})
    assert reply.status == 400, reply
    assert str(most) in _error(reply.body, 400)


async def test_what_is_left_of_the_context_bounds_a_reply(endpoint: Endpoint) -> None:
    body = await endpoint.chat(max_tokens=endpoint.max_model_len, ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == endpoint.max_model_len


@pytest.mark.parametrize(
    "body",
    [
        {"messages": QUESTION, "temperature": -1},
        {"messages": QUESTION, "top_p": 1.5},
        {"messages": QUESTION, "max_tokens": "many"},
        {"messages": QUESTION, "n": 0},
        {"messages": "text"},
        {"messages": QUESTION, "top_logprobs": 2},
        {},
    ],
)
async def test_bad_field_is_400(endpoint: Endpoint, body: dict[str, Any]) -> None:
    reply = await endpoint.post("/v1/chat/completions", {"model": "policy", **body})
    assert reply.status == 400, reply
    _error(reply.body, 400)


async def test_bad_json_is_400(endpoint: Endpoint) -> None:
    reply = await endpoint.post("/v1/chat/completions", data=b'{"model": ')
    assert reply.status == 400


# --- leaving, pausing, new weights ----------------------------------------------------------------------------------


async def test_a_client_that_goes_away_aborts_the_generation(endpoint: Endpoint) -> None:
    asked = {"max_tokens": 220, "ignore_eos": True}
    before = await endpoint.metric(GENERATED)
    async with contextlib.aclosing(endpoint.events("/v1/chat/completions", {"messages": QUESTION, **asked})) as events:
        async for _ in events:
            break
    await endpoint.until("vllm:num_requests_running", lambda running: running == 0)
    assert await endpoint.metric(GENERATED) < before + 220
    before = await endpoint.metric(GENERATED)
    request = asyncio.ensure_future(endpoint.chat(**asked))
    await endpoint.until(GENERATED, lambda generated: generated > before)
    request.cancel()
    await endpoint.until("vllm:num_requests_running", lambda running: running == 0)
    assert await endpoint.metric(GENERATED) < before + 220


async def test_pause_keep_freezes_and_resume_goes_on(endpoint: Endpoint) -> None:
    tokens: list[int] = []
    asked = {"messages": QUESTION, "max_tokens": 200, "temperature": 1.0, "ignore_eos": True, **EXACT}
    assert (await endpoint.get("/is_paused")).body == {"is_paused": False}
    async with contextlib.aclosing(endpoint.events("/v1/chat/completions", asked)) as events:
        opening = json.loads(await anext(events))
        chunk = json.loads(await anext(events))
        tokens += chunk["choices"][0]["token_ids"]
        assert (await endpoint.post("/pause?mode=keep")).status == 200
        try:
            assert (await endpoint.get("/is_paused")).body == {"is_paused": True}
            generated = await endpoint.metric(GENERATED)
            waiting = asyncio.ensure_future(endpoint.chat(max_tokens=2, ignore_eos=True))
            done, _ = await asyncio.wait([waiting], timeout=0.3)
            assert not done
            assert await endpoint.metric(GENERATED) == generated
        finally:
            assert (await endpoint.post("/resume")).status == 200
        assert (await endpoint.get("/is_paused")).body == {"is_paused": False}
        logprobs = [entry["logprob"] for entry in chunk["choices"][0]["logprobs"]["content"]]
        async for event in events:
            if event != "[DONE]":
                (choice,) = json.loads(event)["choices"]
                tokens += choice["token_ids"]
                logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(tokens) == 200
    _check(endpoint, opening["prompt_token_ids"], tokens, logprobs)
    assert (await waiting)["usage"]["completion_tokens"] == 2


async def test_pause_abort_ends_what_runs(endpoint: Endpoint) -> None:
    """Many choices at once: a server may make the 220 tokens of one faster than a pause can reach it."""
    tokens = 0
    finished: set[str] = set()
    asked = {"messages": QUESTION, "max_tokens": 220, "n": 16, "ignore_eos": True, "return_token_ids": True}
    async with contextlib.aclosing(endpoint.events("/v1/chat/completions", asked)) as events:
        await anext(events)
        assert (await endpoint.post("/pause?mode=abort")).status == 200
        try:
            async for event in events:
                if event != "[DONE]":
                    (choice,) = json.loads(event)["choices"]
                    tokens += len(choice.get("token_ids") or [])
                    finished |= {choice["finish_reason"]} if choice["finish_reason"] else set()
        finally:
            assert (await endpoint.post("/resume")).status == 200
    assert "abort" in finished, f"{finished} after {tokens} tokens"
    assert tokens < 16 * 220


async def test_pause_wait_finishes_what_runs(endpoint: Endpoint) -> None:
    before = await endpoint.metric(GENERATED)
    request = asyncio.ensure_future(endpoint.chat(max_tokens=100, ignore_eos=True, return_token_ids=True))
    await endpoint.until(GENERATED, lambda generated: generated > before)
    assert (await endpoint.post("/pause?mode=wait")).status == 200
    try:
        assert await endpoint.metric("vllm:num_requests_running") == 0
        assert len((await request)["choices"][0]["token_ids"]) == 100
    finally:
        assert (await endpoint.post("/resume")).status == 200


async def _load(endpoint: Endpoint, folder: Path, version: str) -> None:
    """The trainer's weight push."""
    assert (await endpoint.post("/pause?mode=keep")).status == 200
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    reply = await endpoint.post("/collective_rpc", rpc)
    assert reply.status == 200, reply
    assert (await endpoint.post("/reset_prefix_cache")).status == 200
    reply = await endpoint.post("/update_weight_version", {"new_version": version})
    assert reply.body == {"success": True, "new_version": version}
    assert (await endpoint.post("/resume")).status == 200
    assert (await endpoint.get("/weight_info")).body == {"weight_version": version}


async def test_new_weights_are_sampled_from_after_a_push(endpoint: Endpoint) -> None:
    asked = {"temperature": 1.0, "max_tokens": 20, "seed": 9, "ignore_eos": True, **EXACT}
    try:
        await _load(endpoint, endpoint.other, "1.1")
        body = await endpoint.chat(**asked)
        (choice,) = body["choices"]
        logprobs = _chat_logprobs(choice)
        _check(endpoint, body["prompt_token_ids"], choice["token_ids"], logprobs, folder=endpoint.other)
        old = _reference(endpoint.folder, body["prompt_token_ids"], choice["token_ids"])
        assert float((torch.tensor(logprobs) - old).abs().max()) > 0.1
    finally:
        await _load(endpoint, endpoint.folder, "1.2")
    body = await endpoint.chat(**asked)
    (choice,) = body["choices"]
    _check(endpoint, body["prompt_token_ids"], choice["token_ids"], _chat_logprobs(choice))


async def test_versions_are_exact_per_token_across_a_push(endpoint: Endpoint) -> None:
    if endpoint.name == "vllm":
        pytest.skip("vLLM 0.32 has no return_weight_versions in chat completions")
    tokens: list[int] = []
    logprobs: list[float] = []
    asked = {"messages": QUESTION, "max_tokens": 220, "ignore_eos": True, "return_weight_versions": True, **EXACT}
    await _load(endpoint, endpoint.folder, "2.0")
    try:
        async with contextlib.aclosing(endpoint.events("/v1/chat/completions", asked)) as events:
            opening = json.loads(await anext(events))
            async for event in events:
                if event == "[DONE]":
                    break
                (choice,) = json.loads(event)["choices"]
                if not tokens:
                    await _load(endpoint, endpoint.other, "2.1")
                tokens += choice["token_ids"]
                logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        first, second = choice["weight_versions"]
    finally:
        await _load(endpoint, endpoint.folder, "2.2")
    boundary = first["end"]
    assert first == {"version": "2.0", "start": 0, "end": boundary}
    assert second == {"version": "2.1", "start": boundary, "end": 220}
    assert 0 < boundary < 220
    prompt = opening["prompt_token_ids"]
    _check(endpoint, prompt, tokens[:boundary], logprobs[:boundary])
    _check(endpoint, prompt + tokens[:boundary], tokens[boundary:], logprobs[boundary:], folder=endpoint.other)
