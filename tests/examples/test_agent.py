"""The agent of the calculator example against a scripted OpenAI endpoint, as a process and in process."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import agent
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

QUESTION = "There are 12 boxes with 12 eggs each. How many eggs?"


def says(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def calls(*arguments: str, name: str = "calculator") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": text}}
            for index, text in enumerate(arguments)
        ],
    }


@asynccontextmanager
async def endpoint(*replies: dict[str, Any] | int) -> AsyncIterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """An OpenAI endpoint that gives these messages or error codes in turn: the environment for it, its requests."""
    requests: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer the-key"
        requests.append(await request.json())
        reply = replies[len(requests) - 1]
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "no", "type": "bad_request"}}, status=reply)
        choice = {"index": 0, "message": reply, "finish_reason": "tool_calls" if "tool_calls" in reply else "stop"}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield {"OPENAI_BASE_URL": f"http://{host}:{port}/v1", "OPENAI_API_KEY": "the-key"}, requests
    finally:
        await runner.cleanup()


async def ask(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    return await asyncio.to_thread(agent.answer, QUESTION)


async def run_script(script: Path, environment: dict[str, str]) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    out, err = await process.communicate(f"{QUESTION}\n".encode())
    return process.returncode, out.decode(), err.decode()


async def test_as_a_process_it_reads_a_question_and_prints_the_answer(calculator: Path) -> None:
    async with endpoint(calls('{"expression": "12*12"}'), says("Answer: 144")) as (environment, requests):
        code, out, err = await run_script(calculator / "agent.py", {**environment, "OPENAI_MODEL": "small"})
    assert (code, out, err) == (0, "Answer: 144\n", "")
    first, second = requests
    assert first["messages"] == [{"role": "system", "content": agent.SYSTEM}, {"role": "user", "content": QUESTION}]
    for request in requests:
        assert request["model"] == "small"
        assert (request["max_tokens"], request["temperature"]) == (40, 1)
        assert [tool["function"]["name"] for tool in request["tools"]] == ["calculator"]
    assert second["messages"][:2] == first["messages"]
    call, result = second["messages"][2:]
    assert call["role"] == "assistant"
    assert call["tool_calls"][0]["id"] == "call-0"
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression": "12*12"}'}
    assert result == {"role": "tool", "tool_call_id": "call-0", "content": "144"}


async def test_an_error_of_the_endpoint_is_an_error_of_the_agent(calculator: Path) -> None:
    async with endpoint(400) as (environment, requests):
        code, out, err = await run_script(calculator / "agent.py", environment)
    assert code == 1
    assert out == ""
    assert "BadRequestError" in err
    assert len(requests) == 1


async def test_the_model_is_called_policy_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint(says("Answer: 1")) as (environment, requests):
        assert await ask(monkeypatch, environment) == "Answer: 1"
    assert requests[0]["model"] == "policy"


async def test_it_gives_up_after_four_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with endpoint(*[calls('{"expression": "1+1"}')] * 5) as (environment, requests):
        assert await ask(monkeypatch, environment) == ""
    assert len(requests) == 4


async def test_the_model_hears_of_calls_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = calls("no json", '{"expression": "2/1"}', '{"expression": "2-5"}')
    async with endpoint(bad, calls("{}", name="browser"), says("done")) as (environment, requests):
        assert await ask(monkeypatch, environment) == "done"
    results = [message["content"] for message in requests[2]["messages"] if message["role"] == "tool"]
    assert results == ["error", "error", "-3", "error"]


def test_its_import_starts_no_thread(calculator: Path) -> None:
    """A launcher forks the interpreter after its imports: a thread would be lost in the child."""
    code = "import os, agent; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=calculator, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_it_knows_nothing_of_kitestring(calculator: Path) -> None:
    assert "kitestring" not in (calculator / "agent.py").read_text().lower()


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers | numbers.map("-{}".format),
    lambda parts: st.tuples(parts, st.sampled_from("+-*"), parts).map("({0[0]} {0[1]} {0[2]})".format),
    max_leaves=8,
)


@given(expressions)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    assert agent.calculator(json.dumps({"expression": expression})) == str(eval(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2**3",
        "7/2",
        "7//2",
        "1.5+1",
        "True",
        "a",
        "print(1)",
        "__import__('os')",
        "1 if 1 else 2",
        "(" * 300,
        "1;2",
    ],
)
def test_the_calculator_refuses_what_is_not_arithmetic(expression: str) -> None:
    assert agent.calculator(json.dumps({"expression": expression})) == "error"


@given(
    st.text()
    | st.recursive(
        st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.just("expression"), x)
    ).map(json.dumps)
)
def test_the_calculator_survives_whatever_the_model_says(arguments: str) -> None:
    result = agent.calculator(arguments)
    assert result == "error" or int(result) is not None
