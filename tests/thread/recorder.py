"""What stands around the run: a proxy before the policy server that keeps every reply, and a judge. Own thread."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

JUDGE_TOKENS = 25
"""Of each of the judge's replies, as its usage says."""


DONE = b"data: [DONE]\n\n"
_TEXT = re.compile(rb'"content":"[^"].*?\n\n', re.DOTALL)


@dataclass(eq=False)
class Exchange:
    """A request as the policy server got it, and what it produced."""

    path: str
    request: dict[str, Any]
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    abandoned: bool = False
    """The gateway went away before the reply was complete."""

    @property
    def label(self) -> str:
        return str(self.request["user"])


class Recorder:
    """Serves at `url`, for the policy server at `upstream`; and the judge at `judge_url`.

    Replies pass as they come. After the first text of a stream whose label ends in `:hold` nothing more passes; after
    the first token of one that ends in `:update`, `update` runs.
    """

    def __init__(self, upstream: str, judge_key: str) -> None:
        self.exchanges: list[Exchange] = []
        self.judged: list[tuple[dict[str, str], dict[str, Any]]] = []
        """Headers and body of each request to the judge."""
        self.update: Callable[[], Awaitable[None]] | None = None
        self.url = self.judge_url = ""
        self._upstream = upstream
        self._judge_key = judge_key
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Recorder:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._pass)
        app.router.add_post("/v1/completions", self._pass)
        app.router.add_post("/judge/v1/chat/completions", self._judge)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.judge_url = self.url + "/judge/v1"
        async with aiohttp.ClientSession() as self._session:
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        exchange = Exchange(request.path, json.loads(raw))
        self.exchanges.append(exchange)
        headers = {"Content-Type": "application/json"}
        held = None
        try:
            async with self._session.post(self._upstream + request.path, data=raw, headers=headers) as reply:
                exchange.status = reply.status
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
                await response.prepare(request)
                passed = 0
                updating = exchange.label.endswith(":update")
                async for data in reply.content.iter_any():
                    exchange.body += data
                    held = _first_text(exchange.body) if exchange.label.endswith(":hold") else None
                    await response.write(bytes(exchange.body[passed:held]))
                    passed = len(exchange.body)
                    if held is not None:
                        await asyncio.Event().wait()  # until the gateway goes away
                    if updating and self.update is not None and b'"token_ids"' in exchange.body:
                        updating = False
                        await self.update()
                await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            # Who has the last event may go before the end of the body.
            exchange.abandoned = held is not None or not exchange.body.endswith(DONE)
            raise
        return response

    async def _judge(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.judged.append((dict(request.headers), body))
        given = request.headers.get("Authorization", "")
        echo = {"X-Echo": given}
        if given != f"Bearer {self._judge_key}":
            return web.json_response({"error": {"message": "wrong key", "code": "invalid"}}, status=401, headers=echo)
        message = {"role": "assistant", "content": "7"}
        reply = {
            "id": f"judged-{len(self.judged)}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "token_ids": [1, 2, 3]}],
            "usage": {"prompt_tokens": 10, "completion_tokens": JUDGE_TOKENS - 10, "total_tokens": JUDGE_TOKENS},
        }
        return web.json_response(reply, headers=echo)


def _first_text(stream: bytes | bytearray) -> int | None:
    """Where the first event ends that holds text; None when it has not come."""
    found = _TEXT.search(stream)
    return found.end() if found else None
