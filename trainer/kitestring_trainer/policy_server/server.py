"""The HTTP side: vLLM's routes on aiohttp, in front of the decoding thread."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TextIO

import orjson
import torch
from aiohttp import web
from transformers.utils.logging import disable_progress_bar

from kitestring_trainer.policy_server.config import PolicyServerConfig
from kitestring_trainer.policy_server.engine import PAUSE_MODES, Engine, NotPaused
from kitestring_trainer.policy_server.errors import PolicyServerError, RequestRefused, error_body
from kitestring_trainer.policy_server.metrics import CONTENT_TYPE, ServerMetrics
from kitestring_trainer.policy_server.model import load_model
from kitestring_trainer.policy_server.replies import ReplyWriter
from kitestring_trainer.policy_server.requests import GenerationRequest, Served, chat_request, completion_request
from kitestring_trainer.policy_server.sequence import GeneratedSequence
from kitestring_trainer.policy_server.tokenizer import load_tokenizer
from kitestring_trainer.policy_server.weights import read_weights

logger = logging.getLogger(__name__)

_SHORT_BODY = 16_384
"""Bytes of a request whose prompt is made in less time than a change of threads is worth."""
_SWITCH_SECONDS = 0.001
"""Longest time the decoding thread and the server keep each other from running Python."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(config: PolicyServerConfig, announce: TextIO = sys.stdout) -> None:
    """Load the model, serve it, print `{"listening": {"http": url}}` to `announce`; returns after SIGTERM or SIGINT.

    Raises PolicyServerError for a user's mistake, and the decoding thread's error when that fails.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    torch.set_num_threads(config.threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = PolicyServer(config)
    url = await server.start()
    try:
        announce.write(orjson.dumps({"listening": {"http": url}}).decode() + "\n")
        announce.flush()
        ends = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(server.failure())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
    finally:
        await server.stop()
    if server.error is not None:
        raise server.error


class PolicyServer:
    """One served model. `start` on a running loop, then `stop`."""

    def __init__(self, config: PolicyServerConfig) -> None:
        self._config = config
        self._model = load_model(config.model, config.max_model_len)
        tokenizer = load_tokenizer(config.model, self._model.config)
        if config.require_chat_template and not tokenizer.has_chat_template:
            raise PolicyServerError(
                f"the tokenizer of {config.model} has no chat template: add chat_template to its "
                "tokenizer_config.json, or a chat_template.jinja beside it"
            )
        self._served = Served(
            model_name=config.served_model_name,
            max_model_len=self._model.max_model_len,
            vocabulary=self._model.vocabulary,
            tokenizer=tokenizer,
            tool_parser=config.tool_parser,
        )
        self._created = int(time.time())
        self._requests = 0
        self.error: BaseException | None = None
        """What ended the decoding thread, if it failed."""

    async def start(self) -> str:
        """Bind and begin to serve; returns the base URL."""
        self._loop = asyncio.get_running_loop()
        self._failed = asyncio.Event()
        self._prompts = ThreadPoolExecutor(1, "prompts")
        self._reloading = asyncio.Lock()
        self._engine = Engine(
            self._model,
            max_sequences=self._config.max_sequences,
            version=self._config.weight_version,
            publish=lambda news: self._call(_notify, news),
            failed=lambda error: self._call(self._fail, error),
        )
        self._metrics = ServerMetrics(self._engine.stats, self._config.served_model_name)
        app = web.Application(client_max_size=self._config.max_request_bytes, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/weight_info", self._weight_info),
                web.post("/update_weight_version", self._update_weight_version),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        host, port = self._config.host, self._config.port
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise PolicyServerError(f"cannot listen on {host}:{port}: {error.strerror}; choose another port") from error
        self._engine.start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Abort what is being generated and close."""
        await asyncio.to_thread(self._engine.stop)
        await self._runner.cleanup()
        self._prompts.shutdown(wait=False, cancel_futures=True)

    async def failure(self) -> None:
        """Returns when the decoding thread has failed; see `error`."""
        await self._failed.wait()

    def _call(self, function: Callable[[Any], None], argument: object) -> None:
        """From the decoding thread to the loop, which may be closing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._failed.set()

    # --- generation ----------------------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, await self._checked(chat_request, request), "chatcmpl-")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, await self._checked(completion_request, request), "cmpl-")

    async def _checked(
        self, check: Callable[[dict[str, Any], Served], GenerationRequest], request: web.Request
    ) -> GenerationRequest:
        """A long prompt takes its time to become tokens: in a thread, where it holds up no reply."""
        body = await _json_body(request)
        if len(await request.read()) <= _SHORT_BODY:
            return check(body, self._served)
        return await self._loop.run_in_executor(self._prompts, check, body, self._served)

    async def _generate(self, request: web.Request, asked: GenerationRequest, prefix: str) -> web.StreamResponse:
        arrived = time.monotonic()
        self._requests += 1
        news = asyncio.Event()
        fallback_seed = f"server {self._config.seed} request {self._requests}"
        sequences = asked.sequences(self._served.tokenizer, fallback_seed, news.set)
        name = request.headers.get("X-Request-Id") or secrets.token_hex(16)
        writer = ReplyWriter(f"{prefix}{name}", self._served.model_name, asked, sequences, self._served.tokenizer)
        self._engine.submit(sequences)
        try:
            if asked.stream:
                return await _stream(request, writer, news)
            while any(sequence.finish_reason is None for sequence in sequences):
                news.clear()
                await news.wait()
            if message := _failure(sequences):
                return _json(error_body(message, HTTPStatus.INTERNAL_SERVER_ERROR), HTTPStatus.INTERNAL_SERVER_ERROR)
            return _json(writer.whole())
        finally:
            unfinished = [sequence for sequence in sequences if sequence.finish_reason is None]
            if unfinished:  # The client has gone away.
                self._engine.cancel(unfinished)
            if sequences[0].first_token_at is not None:
                self._metrics.first_token.observe(sequences[0].first_token_at - arrived)
            self._metrics.latency.observe(time.monotonic() - arrived)

    # --- what is served ------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        card = {
            "id": self._served.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kitestring",
            "root": str(self._config.model),
            "parent": None,
            "max_model_len": self._served.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        # The thread lives for a moment after it has reported its failure.
        if self._engine.alive and self.error is None:
            return web.Response()
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return _json(error_body("the decoding thread has ended", status), status)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # --- weights -------------------------------------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        for known in PAUSE_MODES:
            if mode == known:
                await _done(self._engine.pause(known))
                return _json({"status": "paused"})
        raise RequestRefused(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}", param="mode")

    async def _resume(self, _: web.Request) -> web.Response:
        await _done(self._engine.resume())
        return _json({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": self._engine.paused})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await _json_body(request)
        if body.get("method") != "reload_weights":
            raise RequestRefused("the only method is reload_weights", param="method")
        arguments = body.get("kwargs")
        folder = arguments.get("weights_path") if isinstance(arguments, dict) else None
        if not isinstance(folder, str):
            raise RequestRefused('kwargs must be {"weights_path": folder}', param="kwargs")
        async with self._reloading:
            weights = await asyncio.to_thread(read_weights, folder, self._config.weights_root, self._model.weights())
            try:
                await _done(self._engine.install(weights))
            except NotPaused as error:
                raise RequestRefused(
                    "weights change only while generation is paused: POST /pause first", status=HTTPStatus.CONFLICT
                ) from error
        logger.info("loaded the weights in %s", folder)
        return _json({"results": [None]})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        # Nothing is kept of a sequence that has ended, and those that go on are computed anew after a reload.
        return _json({"success": True})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self._engine.version})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        version = (await _json_body(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise RequestRefused("new_version must be text", param="new_version")
        await _done(self._engine.set_version(version))
        return _json({"success": True, "new_version": version})


def _notify(news: list[GeneratedSequence]) -> None:
    for sequence in news:
        sequence.notify()


async def _done(future: Future[None]) -> None:
    # Shielded: a client that goes away must not cancel what the decoding thread will answer.
    await asyncio.shield(asyncio.wrap_future(future))


def _failure(sequences: list[GeneratedSequence]) -> str | None:
    if any(sequence.finish_reason == "error" for sequence in sequences):
        return "the model's output is not finite, or the server is failing; see its log"
    return None


async def _stream(request: web.Request, writer: ReplyWriter, news: asyncio.Event) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    started = False
    while not writer.finished:
        await news.wait()
        news.clear()
        parts = [orjson.dumps(chunk) for chunk in writer.chunks()]
        if writer.finished:
            if message := _failure(writer.sequences):
                parts.append(orjson.dumps(error_body(message, HTTPStatus.INTERNAL_SERVER_ERROR)))
            elif writer.request.include_usage:
                parts.append(orjson.dumps(writer.usage_chunk()))
            parts.append(b"[DONE]")
        if parts:
            if not started:
                started = True
                await response.prepare(request)
            await response.write(b"".join(b"data: %b\n\n" % part for part in parts))
    await response.write_eof()
    return response


async def _json_body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    return body


def _json(data: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as error:
        return _json(error.body(), error.status)
    except web.HTTPException as error:
        status = HTTPStatus(error.status)
        return _json(error_body(f"{request.method} {request.path}: {error.reason}", status), status)
    except ConnectionResetError as gone:
        raise asyncio.CancelledError from gone  # aiohttp takes this for what it is: nobody is there to answer
    except Exception:  # the request's boundary: logged with its traceback, and answered
        logger.exception("%s %s failed", request.method, request.path)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return _json(error_body("internal error; see the server's log", status), status)
