"""A client of policy servers, and what the tests say to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]
QUESTION = [{"role": "user", "content": "There are 48 boxes. How many pears?"}]


@dataclass(frozen=True)
class Policies:
    """Two sets of weights under one tokenizer."""

    root: Path
    first: Path
    second: Path


@dataclass
class Reply:
    status: int
    body: Any


@dataclass
class Stream:
    """All chunks of a streamed reply, taken apart."""

    chunks: list[dict[str, Any]]
    done: bool
    usage: dict[str, Any] | None = None
    content: dict[int, str] = field(default_factory=dict)
    tool_calls: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reason: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if chunk.get("usage"):
                self.usage = chunk["usage"]
            for choice in chunk["choices"]:
                self._take(choice)

    def _take(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        delta = choice.get("delta", {})
        text = choice.get("text", delta.get("content")) or ""
        self.content[index] = self.content.get(index, "") + text
        calls = self.tool_calls.setdefault(index, [])
        for part in delta.get("tool_calls") or []:
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "function": {"name": "", "arguments": ""}})
            function = calls[part["index"]]["function"]
            for key in ("name", "arguments"):
                function[key] += (part.get("function") or {}).get(key) or ""
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        logprobs = choice.get("logprobs") or {}
        entries = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
        self.logprobs.setdefault(index, []).extend(entries)
        if choice.get("finish_reason"):
            assert index not in self.finish_reason
            self.finish_reason[index] = choice["finish_reason"]


@dataclass
class Endpoint:
    """A running policy server and what the tests may expect of it."""

    name: str
    url: str
    model: str
    folder: Path
    """What it serves at first."""
    other: Path
    """Weights it can be told to load."""
    max_model_len: int
    tolerance: float
    """Largest difference of a logprob from a plain float32 forward pass."""
    session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Any = None, *, data: bytes | None = None) -> Reply:
        assert self.session is not None
        payload = data if data is not None else json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=payload, headers=headers) as response:
            text = await response.text()
            return Reply(response.status, json.loads(text) if text else None)

    async def get(self, path: str) -> Reply:
        assert self.session is not None
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            return Reply(response.status, json.loads(text) if text and response.content_type.endswith("json") else text)

    async def chat(self, **fields: Any) -> Any:
        reply = await self.post("/v1/chat/completions", {"model": self.model, "messages": QUESTION, **fields})
        assert reply.status == 200, reply
        return reply.body

    async def complete(self, **fields: Any) -> Any:
        reply = await self.post("/v1/completions", {"model": self.model, **fields})
        assert reply.status == 200, reply
        return reply.body

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
        """The data of each server-sent event, as it arrives."""
        assert self.session is not None
        async with self.session.post(self.url + path, json={"model": self.model, "stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    yield line[6:].decode().strip()

    async def stream(self, path: str, **fields: Any) -> Stream:
        events = [event async for event in self.events(path, fields)]
        return Stream([json.loads(event) for event in events if event != "[DONE]"], done=events[-1] == "[DONE]")

    async def metric(self, name: str) -> float:
        text = (await self.get("/metrics")).body
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))

    async def until(self, name: str, true: Callable[[float], bool]) -> None:
        """Wait until a metric is as wanted."""
        async with asyncio.timeout(30):
            while not true(await self.metric(name)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
