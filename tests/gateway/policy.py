"""A scripted model server with vLLM's shapes: what it says is a plan, every request it got is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]


@dataclass
class Plan:
    """One reply. Pieces are (text, token ids, logprobs) and become chunks of a stream."""

    pieces: list[tuple[str, list[int], list[float]]] = field(
        default_factory=lambda: [("Hel", [11], [-0.5]), ("", [12], [-0.25]), ("lo", [13, 2], [-1.0, -0.125])]
    )
    prompt_ids: list[int] | None = field(default_factory=lambda: [1, 2, 3, 4])
    versions: bool = True
    version: str = "1.0"
    header_version: str | None = None
    status: int = 200
    body: bytes | None = None
    retry_after: str | None = None
    ids: bool = True
    usage: bool = True
    tool_call: Json | None = None
    n: int = 1
    break_after: int | None = None
    """A stream is cut after so many chunks; 0 for a unary reply: after its head."""
    error_after: int | None = None
    """An error event after so many chunks."""
    before: asyncio.Event | None = None
    """Waited for before the reply's head."""
    between: Callable[[int], Any] | None = None
    """Called before each chunk with its number; what it returns is awaited."""


class Policy:
    """The server; `plans` are used in turn, the last for ever."""

    def __init__(self) -> None:
        self.plans: list[Plan] = [Plan()]
        self.requests: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()
        self.dies = False
        """Before it answers anything."""
        self._transports: list[asyncio.Transport] = []
        self.app = web.Application(client_max_size=64 << 20)
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    def abort(self) -> None:
        """Break all connections, as a process that is killed."""
        for transport in self._transports:
            transport.abort()

    def say(self, *plans: Plan) -> None:
        self.plans = list(plans)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        body = json.loads(await request.read() or b"{}")
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]
        self.arrived.set()
        assert request.transport is not None
        self._transports.append(request.transport)
        if self.dies:
            self.abort()
        try:
            if plan.before is not None:
                await plan.before.wait()
            return await self._reply(request, body, plan)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted.set()
            raise

    async def _reply(self, request: web.Request, body: Json, plan: Plan) -> web.StreamResponse:
        headers = {}
        if plan.header_version is not None:
            headers["X-Kitestring-Policy-Version"] = plan.header_version
        if plan.retry_after is not None:
            headers["Retry-After"] = plan.retry_after
        if plan.status != 200 or plan.body is not None:
            raw = plan.body if plan.body is not None else b'{"error": {"message": "no", "type": "Bad", "code": 7}}'
            return web.Response(status=plan.status, body=raw, headers=headers, content_type="application/json")
        chat = request.path.endswith("/chat/completions")
        if body.get("stream"):
            return await self._stream(request, body, plan, chat, headers)
        if plan.break_after is not None:
            response = web.StreamResponse(headers={**headers, "Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"id": ')
            request.transport.close()  # type: ignore[union-attr]
            return response
        return web.json_response(whole(body, plan, chat), headers=headers)

    async def _stream(
        self, request: web.Request, body: Json, plan: Plan, chat: bool, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, chunk in enumerate(chunks(body, plan, chat)):
            if plan.between is not None:
                await plan.between(number)
            if plan.break_after == number:
                request.transport.close()  # type: ignore[union-attr]
                return response
            failed = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
            event = failed if plan.error_after == number else chunk
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(plan: Plan) -> Json:
    completion = plan.n * sum(len(ids) for _, ids, _ in plan.pieces)
    prompt = len(plan.prompt_ids or ())
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def whole(body: Json, plan: Plan, chat: bool) -> Json:
    ids = [token for _, tokens, _ in plan.pieces for token in tokens]
    logprobs = [value for _, _, values in plan.pieces for value in values]
    text = "".join(piece for piece, _, _ in plan.pieces)
    versions = [{"version": plan.version, "start": 0, "end": len(ids)}]
    choices = []
    for index in range(plan.n):
        choice: Json = {"index": index, "finish_reason": "stop", "stop_reason": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
            if plan.tool_call is not None:
                choice["message"] = {"role": "assistant", "content": None, "tool_calls": [plan.tool_call]}
                choice["finish_reason"] = "tool_calls"
            choice["logprobs"] = {
                "content": [{"token": "t", "logprob": value, "bytes": [1], "top_logprobs": []} for value in logprobs]
            }
        else:
            choice["text"] = text
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": ["t"] * len(ids)}
        if not body.get("logprobs") and body.get("logprobs") != 0:
            choice["logprobs"] = None
        if plan.ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
            if not chat:
                choice["prompt_token_ids"] = plan.prompt_ids
        if plan.versions and body.get("return_weight_versions"):
            choice["weight_versions"] = versions
        choices.append(choice)
    reply: Json = {
        "id": "cmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": choices,
    }
    if chat and plan.ids and body.get("return_token_ids"):
        reply["prompt_token_ids"] = plan.prompt_ids
    reply["prompt_logprobs"] = None
    if plan.usage:
        reply["usage"] = _usage(plan)
    return reply


def chunks(body: Json, plan: Plan, chat: bool) -> list[Json]:
    made: list[Json] = []

    def chunk(choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if chat else "text_completion"
        made.append({"id": "cmpl-1", "object": kind, "created": 1, "model": body["model"], "choices": choices})
        return made[-1]

    with_ids = plan.ids and body.get("return_token_ids")
    if chat:
        first = chunk([{"index": i, "delta": {"role": "assistant", "content": ""}} for i in range(plan.n)])
        if with_ids:
            first["prompt_token_ids"] = plan.prompt_ids
    position = 0
    for number, (text, ids, logprobs) in enumerate(plan.pieces):
        position += len(ids)
        last = number == len(plan.pieces) - 1
        for index in range(plan.n):
            choice: Json = {"index": index, "finish_reason": "stop" if last else None}
            if chat:
                choice["delta"] = {"content": text} if text else {}
                choice["logprobs"] = {"content": [{"token": "t", "logprob": value, "bytes": []} for value in logprobs]}
                if plan.tool_call is not None and last:
                    choice["delta"] = {"tool_calls": [{"index": 0, **plan.tool_call}]}
                    choice["finish_reason"] = "tool_calls"
            else:
                choice["text"] = text
                choice["logprobs"] = {"token_logprobs": logprobs}
                if number == 0 and with_ids:
                    choice["prompt_token_ids"] = plan.prompt_ids
            if with_ids:
                choice["token_ids"] = ids
            if last and plan.versions and body.get("return_weight_versions"):
                choice["weight_versions"] = [{"version": plan.version, "start": 0, "end": position}]
            chunk([choice])
    if plan.usage and (body.get("stream_options") or {}).get("include_usage"):
        chunk([])["usage"] = _usage(plan)
    return made
