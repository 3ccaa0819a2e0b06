"""A scripted OpenAI endpoint in a thread; it can report token ids as policy servers do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = dict[str, Any]


def calls(arguments: str, name: str = "calculator") -> Reply:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-0", "type": "function", "function": function}],
    }


def says(content: str) -> Reply:
    return {"role": "assistant", "content": content}


@dataclass
class OpenAIServer:
    """`replies` in turn, the last one for ever; `status` other than 200 answers every call with an error."""

    replies: Sequence[Reply] = (says("hello"),)
    models: Sequence[str] | None = ("tiny",)
    """None: there is no GET /models."""
    owner: str = "someone"
    key: str | None = None
    ids: bool = False
    finish: str | None = None
    status: int = 200
    tokens_of: Callable[[Sequence[Reply]], bytes] = field(default=lambda messages: b"".join(map(_rendered, messages)))
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def answer(self, path: str, body: dict[str, Any] | None, key: str | None) -> tuple[int, dict[str, Any]]:
        self.keys.append(key)
        if self.key is not None and key != self.key:
            return 401, {"error": {"message": "wrong key"}}
        if body is None and path == "/v1/models" and self.models is not None:
            return 200, {
                "object": "list",
                "data": [{"id": m, "object": "model", "owned_by": self.owner} for m in self.models],
            }
        if body is None or path != "/v1/chat/completions":
            return 404, {"error": {"message": f"no route {path}"}}
        if self.status != 200:
            return self.status, {"error": {"message": "overloaded", "type": "server_error"}}
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(body)
        return 200, self._completion(body, reply)

    def _completion(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        finish = self.finish or ("tool_calls" if reply.get("tool_calls") else "stop")
        choice: dict[str, Any] = {"index": 0, "message": reply, "finish_reason": finish}
        prompt = list(self.tokens_of(body["messages"]) + b"<assistant>")
        response = list(_said(reply) + b"</>")
        found: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(response),
                "total_tokens": len(prompt) + len(response),
            },
        }
        if self.ids and body.get("return_token_ids"):
            found["prompt_token_ids"] = prompt
            choice["token_ids"] = response
            choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5} for _ in response]}
        return found


def _said(message: Reply) -> bytes:
    tools = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    return ((message.get("content") or "") + (json.dumps(tools) if tools else "")).encode()


def _rendered(message: Reply) -> bytes:
    return f"<{message['role']}>".encode() + _said(message) + b"</>"


@contextmanager
def serving(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Serve on a free port; `server.url` is its base URL, with /v1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any] | None) -> None:
            key = self.headers.get("Authorization")
            status, answer = server.answer(self.path, body, key.removeprefix("Bearer ") if key else None)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """The tests look at `requests`."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
