"""Our server's own: start and its errors, refusals, weight routes, sequences that fail."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from policy_endpoint import QUESTION, TOOLS, Endpoint, Policies
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_policy import MAX_MODEL_LEN, make_policy

from kitestring_trainer.policy_server import PolicyServerConfig, PolicyServerError
from kitestring_trainer.policy_server.server import PolicyServer, serve
from kitestring_trainer.policy_server.tokenizer import ServedTokenizer


async def _start(config: PolicyServerConfig) -> tuple[PolicyServer, Endpoint]:
    server = PolicyServer(config)
    url = await server.start()
    return server, Endpoint("own", url, config.served_model_name, config.model, config.model, MAX_MODEL_LEN, 1e-4)


@pytest.fixture
async def own(policies: Policies) -> AsyncIterator[Endpoint]:
    """Our server in this process, without a tool parser."""
    config = PolicyServerConfig(model=policies.first, weights_root=policies.root, max_sequences=4, weight_version="1.0")
    server, endpoint = await _start(config)
    async with aiohttp.ClientSession() as session:
        endpoint.session = session
        yield endpoint
    await server.stop()
    assert server.error is None


# --- start ----------------------------------------------------------------------------------------------------------


def test_importing_the_package_is_cheap() -> None:
    heavy = "{'torch', 'transformers', 'aiohttp'}"
    code = f"import sys, kitestring_trainer.policy_server; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


async def test_serve_announces_itself_and_ends_at_a_signal(policies: Policies) -> None:
    class Announced(io.StringIO):
        whole = asyncio.Event()

        def flush(self) -> None:
            self.whole.set()

    announced = Announced()
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(serve(PolicyServerConfig(model=policies.first), announced))
    async with asyncio.timeout(60):
        await announced.whole.wait()
    url = json.loads(announced.getvalue())["listening"]["http"]
    asked = {"model": "policy", "prompt": "x", "max_tokens": 250, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**asked, "stream": True}),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await serving
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


async def test_serve_fails_when_decoding_fails(policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    server, endpoint = await _start(PolicyServerConfig(model=policies.first))
    monkeypatch.setattr(server._model, "forward", broken)
    async with aiohttp.ClientSession() as session:
        endpoint.session = session
        reply = await endpoint.post("/v1/completions", {"prompt": "x"})
        assert reply.status == 500
        await server.failure()
        assert "broken on purpose" in str(server.error)
        assert (await endpoint.get("/health")).status == 503
    await server.stop()


async def test_a_taken_port_is_named(policies: Policies) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = PolicyServer(PolicyServerConfig(model=policies.first, port=port))
        with pytest.raises(PolicyServerError, match=f"127.0.0.1:{port}"):
            await server.start()


def test_a_folder_that_cannot_be_served_is_refused_in_one_line(policies: Policies, tmp_path: Path) -> None:
    def refusal(folder: Path, **fields: Any) -> str:
        with pytest.raises(PolicyServerError) as refused:
            PolicyServer(PolicyServerConfig(model=folder, **fields))
        assert "\n" not in str(refused.value)
        return str(refused.value)

    def copy(name: str) -> Path:
        return Path(shutil.copytree(policies.first, tmp_path / name))

    assert "does not exist" in refusal(tmp_path / "absent")
    assert "no config.json" in refusal(tmp_path)
    config = copy("config") / "config.json"
    config.write_text("{")
    assert str(config.parent) in refusal(config.parent)
    weights = copy("weights") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(weights.parent) in refusal(weights.parent)
    tensors = load_file(policies.first / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "lacks weights: model.norm.weight" in refusal(weights.parent)
    weights.unlink()
    assert str(weights.parent) in refusal(weights.parent)
    tokenizer = copy("tokenizer")
    (tokenizer / "tokenizer.json").unlink()
    assert str(tokenizer) in refusal(tokenizer)
    assert "max_model_len is 1000" in refusal(policies.first, max_model_len=1000)
    bare = make_policy(tmp_path / "bare", chat_template=False)
    assert "no chat template" in refusal(bare, require_chat_template=True)


def test_config_refuses_what_it_does_not_know(policies: Policies) -> None:
    for wrong in ({"ports": 1}, {"port": -1}, {"tool_parser": "llama3"}, {"threads": 0}):
        with pytest.raises(ValidationError):
            PolicyServerConfig(model=policies.first, **wrong)  # type: ignore[arg-type]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": TOOLS}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [5] * 129}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x"}] * (MAX_MODEL_LEN + 1)}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 256 * MAX_MODEL_LEN}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "input_tokens"),
        ({"max_tokens": MAX_MODEL_LEN + 1}, "max_tokens"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(own: Endpoint, fields: dict[str, Any], param: str) -> None:
    reply = await own.post("/v1/chat/completions", {"model": "policy", "messages": QUESTION, **fields})
    assert reply.status == 400, reply
    assert reply.body["error"]["param"] == param
    assert reply.body["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("fields", [{"model": "x" * 99_999}, {"stream": "x" * 99_999}, {"n": ["x" * 999] * 999}])
async def test_what_is_refused_is_not_echoed_at_length(own: Endpoint, fields: dict[str, Any]) -> None:
    reply = await own.post("/v1/completions", {"model": "policy", "prompt": "x", **fields})
    assert reply.status in (400, 404)
    assert len(reply.body["error"]["message"]) < 2000


@pytest.mark.parametrize("prompt", [None, [], "", [5000], [-1], [[1], []], {"a": 1}, [1, "a"]])
async def test_prompts_that_are_none(own: Endpoint, prompt: Any) -> None:
    reply = await own.post("/v1/completions", {"model": "policy", "prompt": prompt})
    assert reply.status == 400, reply
    assert reply.body["error"]["param"] == "prompt"


async def test_fields_that_ask_for_nothing_are_taken(own: Endpoint) -> None:
    neutral = {
        "frequency_penalty": 0,
        "response_format": {"type": "text"},
        "logit_bias": None,
        "user": "u",
        "tools": [],
    }
    assert len((await own.chat(max_tokens=1, **neutral))["choices"]) == 1


async def test_bodies_that_are_no_request(own: Endpoint) -> None:
    for data in (b"", b"[]", b"5", b"\xff"):
        reply = await own.post("/v1/completions", data=data)
        assert (reply.status, reply.body["error"]["code"]) == (400, 400)
    assert (await own.post("/v1/nothing")).body["error"]["type"] == "NotFoundError"
    assert (await own.get("/pause")).status == 405


async def test_a_body_over_the_limit_is_413(policies: Policies) -> None:
    server, endpoint = await _start(PolicyServerConfig(model=policies.first, max_request_bytes=2000))
    async with aiohttp.ClientSession() as session:
        endpoint.session = session
        reply = await endpoint.post("/v1/completions", {"prompt": "x" * 3000})
        assert (reply.status, reply.body["error"]["code"]) == (413, 413)
    await server.stop()


async def test_a_model_without_a_chat_template_serves_completions_only(tmp_path: Path) -> None:
    server, endpoint = await _start(PolicyServerConfig(model=make_policy(tmp_path / "bare", chat_template=False)))
    async with aiohttp.ClientSession() as session:
        endpoint.session = session
        reply = await endpoint.post("/v1/chat/completions", {"model": "policy", "messages": QUESTION})
        assert reply.status == 400
        assert "chat template" in reply.body["error"]["message"]
        assert (await endpoint.complete(prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2
    await server.stop()


async def test_a_template_that_fails_is_the_request_s_fault(own: Endpoint) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"model": "policy", "messages": QUESTION, "tools": tools, "tool_choice": "none"}
    reply = await own.post("/v1/chat/completions", asked)
    assert reply.status == 400
    assert "chat template" in reply.body["error"]["message"]


async def test_a_template_that_divides_by_zero_is_the_request_s_fault(tmp_path: Path) -> None:
    folder = make_policy(tmp_path / "policy")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ 1 // (messages | length - 1) }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    server, endpoint = await _start(PolicyServerConfig(model=folder))
    async with aiohttp.ClientSession() as session:
        endpoint.session = session
        reply = await endpoint.post("/v1/chat/completions", {"model": "policy", "messages": QUESTION[:1]})
        assert (reply.status, reply.body["error"]["param"]) == (400, "messages")
        assert "ZeroDivisionError" in reply.body["error"]["message"]
    await server.stop()


async def test_a_long_prompt_is_made_beside_the_loop(own: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template of one request waits; the server answers others meanwhile."""
    goes_on, begun = threading.Event(), threading.Event()
    encode = ServedTokenizer.encode

    def slow(self: ServedTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > 10_000:
            begun.set()
            assert goes_on.wait(20)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(ServedTokenizer, "encode", slow)
    long = asyncio.create_task(own.post("/v1/completions", {"model": "policy", "prompt": "x" * 20_000}))
    assert await asyncio.to_thread(begun.wait, 20)
    assert len((await own.chat(max_tokens=1))["choices"]) == 1
    goes_on.set()
    assert (await long).body["error"]["param"] == "input_tokens"


# --- generation -----------------------------------------------------------------------------------------------------


async def test_several_prompts_number_their_choices_through(own: Endpoint) -> None:
    prompts = [[5, 6], [7, 8, 9]]
    body = await own.complete(prompt=prompts, n=2, max_tokens=3, ignore_eos=True, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


async def test_more_choices_than_slots_are_generated_in_turn(own: Endpoint) -> None:
    body = await own.chat(n=9, max_tokens=5, ignore_eos=True, return_weight_versions=True)
    assert len(body["choices"]) == 9
    for choice in body["choices"]:
        assert choice["weight_versions"] == [{"version": "1.0", "start": 0, "end": 5}]


async def test_the_server_s_seed_repeats_requests_without_one(policies: Policies) -> None:
    replies = []
    for seed in (1, 1, 2):
        server, endpoint = await _start(PolicyServerConfig(model=policies.first, seed=seed))
        async with aiohttp.ClientSession() as session:
            endpoint.session = session
            bodies = [await endpoint.chat(max_tokens=20, ignore_eos=True, return_token_ids=True) for _ in range(2)]
            replies.append([body["choices"][0]["token_ids"] for body in bodies])
        await server.stop()
    assert replies[0] == replies[1] != replies[2]
    assert replies[0][0] != replies[0][1]


async def test_the_request_s_id_is_kept(own: Endpoint) -> None:
    assert own.session is not None
    asked = {"model": "policy", "prompt": "x", "max_tokens": 1}
    async with own.session.post(own.url + "/v1/completions", json=asked, headers={"X-Request-Id": "abc"}) as response:
        assert (await response.json())["id"] == "cmpl-abc"


async def test_parallel_tool_calls_false_gives_one(policies: Policies) -> None:
    """The policy says its call, then the end of text; without that end it may say more."""
    server, endpoint = await _start(PolicyServerConfig(model=policies.first, tool_parser="hermes"))
    async with aiohttp.ClientSession() as session:
        endpoint.session = session
        body = await endpoint.chat(temperature=0, tools=TOOLS, parallel_tool_calls=False)
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1
    await server.stop()


async def test_logprobs_are_given_in_full(own: Endpoint) -> None:
    body = await own.chat(max_tokens=30, ignore_eos=True, logprobs=True)
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] == float(torch.tensor(entry["logprob"], dtype=torch.float32))


# --- weights --------------------------------------------------------------------------------------------------------


async def test_weights_change_only_while_paused(own: Endpoint, policies: Policies) -> None:
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(policies.second)}}
    reply = await own.post("/collective_rpc", rpc)
    assert reply.status == 409
    assert "/pause" in reply.body["error"]["message"]


async def test_weights_that_do_not_fit_leave_the_old_ones(own: Endpoint, policies: Policies) -> None:
    asked = {"temperature": 0, "max_tokens": 12, "logprobs": True}
    before = await own.chat(**asked)
    wrong = policies.root / "wrong"
    wrong.mkdir()
    tensors = load_file(policies.second / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, wrong / "model.safetensors")
    assert (await own.post("/pause?mode=wait")).body == {"status": "paused"}
    reply = await own.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(wrong)}})
    assert reply.status == 400
    assert "lm_head.weight" in reply.body["error"]["message"]
    outside = {"method": "reload_weights", "kwargs": {"weights_path": "/"}}
    assert (await own.post("/collective_rpc", outside)).status == 400
    absent = {"method": "reload_weights", "kwargs": {"weights_path": str(policies.root / "absent")}}
    assert (await own.post("/collective_rpc", absent)).status == 404
    assert (await own.post("/resume")).body == {"status": "resumed"}
    assert (await own.get("/weight_info")).body == {"weight_version": "1.0"}
    after = await own.chat(**asked)
    assert after["choices"][0]["logprobs"] == before["choices"][0]["logprobs"]


async def test_wrong_commands_are_refused(own: Endpoint) -> None:
    assert (await own.post("/pause?mode=later")).status == 400
    for body in ({}, {"method": "sleep"}, {"method": "reload_weights"}, {"method": "reload_weights", "kwargs": []}):
        assert (await own.post("/collective_rpc", body)).status == 400
    for body in ({}, {"new_version": 3}, {"new_version": ""}):
        assert (await own.post("/update_weight_version", body)).status == 400


async def test_a_client_that_leaves_a_pause_does_no_harm(own: Endpoint) -> None:
    generating = asyncio.ensure_future(own.chat(max_tokens=200, ignore_eos=True))
    await own.until("vllm:num_requests_running", lambda running: running == 1)
    pausing = asyncio.ensure_future(own.post("/pause?mode=wait"))
    while not (await own.get("/is_paused")).body["is_paused"]:
        pass
    pausing.cancel()
    assert (await generating)["usage"]["completion_tokens"] == 200
    await own.post("/resume")
    assert (await own.chat(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_output_that_is_not_finite_is_a_500(own: Endpoint, policies: Policies) -> None:
    spoiled = policies.root / "spoiled"
    spoiled.mkdir()
    tensors = load_file(policies.first / "model.safetensors")
    tensors["model.norm.weight"][:] = torch.finfo(torch.float32).max
    save_file(tensors, spoiled / "model.safetensors")
    await own.post("/pause")
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(spoiled)}}
    assert (await own.post("/collective_rpc", rpc)).status == 200
    await own.post("/resume")
    reply = await own.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert reply.status == 500
    assert "not finite" in reply.body["error"]["message"]
    events = [event async for event in own.events("/v1/completions", {"prompt": "x", "max_tokens": 3})]
    assert "not finite" in json.loads(events[-2])["error"]["message"]
    assert events[-1] == "[DONE]"
    assert (await own.get("/health")).status == 200
