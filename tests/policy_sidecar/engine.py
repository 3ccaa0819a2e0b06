"""A stand-in for vLLM's server: its routes with its shapes, of the release it is told to be; every request is kept.

What it generates names the weights it holds, so that a test sees which weights answered under which version.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]


class Engine:
    """`start` binds a port of its own, the same one after each `kill`."""

    def __init__(self, *, knows_versions: bool = True, tells_versions: bool = True, tells_start: bool = True) -> None:
        self.knows_versions = knows_versions
        self.tells_versions = tells_versions
        self.tells_start = tells_start
        self.starts = 0
        self.asked: list[str] = []
        self.bodies: list[Json] = []
        self.problems: dict[str, list[int]] = {}
        """Statuses by route, answered in turn before it works."""
        self.arrived = asyncio.Event()
        """A stream, or a call with max_tokens above 1, is being generated."""
        self.go_on = asyncio.Event()
        """Whether it may: cleared by tests."""
        self.go_on.set()
        self.aborted = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """A new process: on its first weights, at the version that vLLM gives them."""
        self.starts += 1
        self.version, self.weights, self._mode = "default", "initial", ""
        self._generating = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Its connections break, those being answered too."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911, PLR0912
        path = request.path
        self.asked.append(f"{request.method} {request.path_qs}")
        body = json.loads(await request.read() or b"{}")
        self.bodies.append(body)
        if self.problems.get(path):
            return web.json_response({"error": {"message": "told to fail"}}, status=self.problems[path].pop(0))
        match path:
            case "/v1/chat/completions" | "/v1/completions":
                return await self._generate(request, body)
            case "/v1/models":
                return web.json_response({"object": "list", "data": [{"id": "policy"}]})
            case "/health":
                return web.Response()
            case "/metrics":
                started = f"process_start_time_seconds {1.7e9 + self.starts}\n" if self.tells_start else ""
                return web.Response(text=f"# TYPE x gauge\n{started}x 1\n", content_type="text/plain")
            case "/pause":
                return await self._pause(request.query["mode"])
            case "/resume":
                self._mode = ""
                self._resumed.set()
            case "/is_paused":
                return web.json_response({"is_paused": bool(self._mode)})
            case "/collective_rpc":
                assert self._mode, "weights change in a server that is not paused"
                self.weights = Path(body["kwargs"]["weights_path"], "weights").read_text()  # noqa: ASYNC240
            case "/reset_prefix_cache":
                pass
            case "/weight_info" if self.knows_versions:
                return web.json_response({"weight_version": self.version})
            case "/update_weight_version" if self.knows_versions:
                self.version = body["new_version"]
            case _:
                raise web.HTTPNotFound
        return web.json_response({})

    async def _pause(self, mode: str) -> web.Response:
        self._mode = mode
        self._resumed.clear()
        while mode == "wait" and self._generating:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return web.json_response({"status": "paused"})

    async def _generate(self, request: web.Request, body: Json) -> web.StreamResponse:
        if not body.get("stream") and body.get("max_tokens") == 1:
            return web.json_response(self._reply(body, [(self.version, self.weights)]))
        await self._resumed.wait()
        self._generating += 1
        made = [(self.version, self.weights)]
        try:
            if body.get("stream"):
                return await self._stream(request)
            self.arrived.set()
            await self.go_on.wait()
            if self._mode == "keep":
                await self._resumed.wait()
            made.append((self.version, self.weights))
            return web.json_response(self._reply(body, made))
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted.set()
            raise
        finally:
            self._generating -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(f"data: {number} {self.weights}\n\n".encode())
            self.arrived.set()
            await self.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, body: Json, made: list[tuple[str, str]]) -> Json:
        choice: Json = {"text": " ".join(weights for _, weights in made)}
        if self.tells_versions and body.get("return_weight_versions"):
            choice["weight_versions"] = [{"version": v, "start": n, "end": n + 1} for n, (v, _) in enumerate(made)]
        return {"choices": [choice]}
