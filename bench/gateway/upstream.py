"""An instant model server: vLLM's shapes, ready-made bytes, no HTTP library. Paths `/small/…` to `/first/…`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import orjson
import uvloop

SMALL_IDS = 20
LARGE_IDS = 75_000
CHUNKS = 200
FIRST_PAUSE_SECONDS = 0.02

Json = dict[str, Any]


def _logprobs(count: int) -> Json:
    return {
        "content": [
            {"token": "tok", "logprob": -0.5 - i / 997, "bytes": [116, 111, 107], "top_logprobs": []}
            for i in range(count)
        ]
    }


def _reply(prompt_ids: int) -> bytes:
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "an answer of twenty tokens, more or less, of plain text",
                    "tool_calls": [],
                },
                "logprobs": _logprobs(SMALL_IDS),
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": list(range(1000, 1000 + SMALL_IDS)),
                "weight_versions": [{"version": "1.0", "start": 0, "end": SMALL_IDS}],
            }
        ],
        "usage": {"prompt_tokens": prompt_ids, "completion_tokens": SMALL_IDS, "total_tokens": prompt_ids + SMALL_IDS},
        "prompt_logprobs": None,
        "prompt_token_ids": [(i * 7919) % 150_000 for i in range(prompt_ids)],
        "kv_transfer_params": None,
    }
    raw = orjson.dumps(body)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n" % len(body) + body + b"\r\n"


def _event(choice: Json, **extra: Any) -> bytes:
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        **extra,
    }
    return _chunk(b"data: " + orjson.dumps(body) + b"\n\n")


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = [
    _event({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=list(range(SMALL_IDS))),
    *(
        _event(
            {
                "index": 0,
                "delta": {"content": " word"},
                "logprobs": _logprobs(1),
                "finish_reason": "stop" if number == CHUNKS - 1 else None,
                "token_ids": [number],
            }
        )
        for number in range(CHUNKS)
    ),
]
STREAM_TAIL = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
REPLIES = {"small": _reply(SMALL_IDS), "large": _reply(LARGE_IDS)}


class InstantServer(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._head: bytes | None = None
        self._missing = 0
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for stream in self._streams:
            stream.cancel()

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self._parts.append(data)
            whole = b"".join(self._parts)
            head, found, body = whole.partition(b"\r\n\r\n")
            if not found:
                self._parts = [whole]
                return
            self._parts = []
            self._head = head
            lower = head.lower()
            at = lower.index(b"content-length:") + 15
            self._missing = int(lower[at:].split(b"\r\n", 1)[0]) - len(body)
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            kind = self._head.split(b"/", 2)[1].decode()
            self._head = None
            self._answer(kind)

    def _answer(self, kind: str) -> None:
        assert self._transport is not None
        reply = REPLIES.get(kind)
        if reply is not None:
            self._transport.write(reply)
        else:
            stream = asyncio.get_running_loop().create_task(self._stream(FIRST_PAUSE_SECONDS if kind == "first" else 0))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _stream(self, pause: float) -> None:
        assert self._transport is not None
        self._transport.write(STREAM_HEAD + STREAM[0])
        await asyncio.sleep(pause)
        for chunk in STREAM[1:]:
            self._transport.write(chunk)  # each in a write, hence usually a segment, of its own
            if not pause:
                await asyncio.sleep(0)
        self._transport.write(STREAM_TAIL)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(InstantServer, "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"listening": {"upstream": f"http://127.0.0.1:{port}"}}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(uvloop.run(_serve()))
