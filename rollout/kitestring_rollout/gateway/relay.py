"""A model server's reply on its way to the agent: recorded, stripped, passed on, whole or chunk by chunk."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from kitestring_rollout.gateway.call import Call
from kitestring_rollout.gateway.capture import Capture, MalformedReply
from kitestring_rollout.gateway.errors import (
    MAX_ERROR_BYTES,
    Refusal,
    UpstreamRefusal,
    error_body,
    normalised_error,
    upstream_failed,
)
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.ready import JSON_HEAD, STREAM_HEAD, ReadyResponse, begin
from kitestring_rollout.gateway.retries import Answer
from kitestring_rollout.gateway.stream import COMMENT, DONE, DONE_EVENT, EventParser, event
from kitestring_rollout.gateway.strip import strip_chunk, strip_whole
from kitestring_rollout.traces.records import Json

_log = logging.getLogger(__name__)

STREAM_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
AFTER_DONE_SECONDS: Final = 1.0


async def relay(
    request: web.BaseRequest, reply: aiohttp.ClientResponse, call: Call, metrics: Metrics
) -> web.StreamResponse:
    """Passes a reply on. Raises Refusal when nothing of it was sent and it failed, ConnectionResetError when the agent
    is gone; a stream that fails later leaves its error in `call.error`."""
    if reply.status != 200:
        raise await _error(reply, call)
    if call.prepared.stream:
        return await _Stream(request, call, metrics).relay(reply)
    return await _whole(request, reply, call)


async def _whole(request: web.BaseRequest, reply: aiohttp.ClientResponse, call: Call) -> web.StreamResponse:
    try:
        raw = await reply.read()
    except aiohttp.ClientError as error:
        raise upstream_failed(f"the model server's reply broke off: {type(error).__name__}") from error
    try:
        body = _parsed(raw, call)
        call.capture.whole(body)
        strip_whole(body, call.prepared.asked, call.requested_model)
        answer = Answer(JSON_HEAD, _written(body))
    except MalformedReply as error:
        call.capture = Capture(call.api)  # what could not be read or written cannot be recorded
        raise upstream_failed(f"the model server's reply cannot be read: {error}", "upstream_malformed") from None
    call.finished = True
    call.entry.stop(answer)
    call.status = 200
    response = ReadyResponse(answer.head, answer.body)
    await response.prepare(request)
    call.delivered = True
    return response


class _Stream:
    """A stream of events being passed on."""

    def __init__(self, request: web.BaseRequest, call: Call, metrics: Metrics) -> None:
        self._request = request
        self._call = call
        self._metrics = metrics
        self._parser = EventParser()
        self._response = web.StreamResponse(status=200, headers=STREAM_HEADERS)

    async def relay(self, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        call, response = self._call, self._response
        response.enable_chunked_encoding()
        begin(self._request)
        await response.prepare(self._request)
        call.status = 200
        try:
            if not await self._until_done(reply):
                call.error = "the model server's stream broke off"
        except aiohttp.ClientConnectionResetError:
            raise  # of our own side: the agent went away
        except aiohttp.ClientError as error:
            call.error = f"the model server's stream broke off: {type(error).__name__}"
        except MalformedReply as error:
            call.error = f"the model server's stream failed: {error}"
        if call.error is not None:
            # An event for clients that read it, and a body without its end for those that do not.
            await response.write(event(error_body(call.error, "server_error", "upstream_failed")))
            begin(self._request).close()
            return response
        call.finished = True
        call.entry.stop(Answer(STREAM_HEAD, b"".join((*call.sent, DONE_EVENT))))
        await response.write_eof(DONE_EVENT)
        call.delivered = True
        await _read_to_end(reply)
        return response

    async def _until_done(self, reply: aiohttp.ClientResponse) -> bool:
        """True when the last event has come, False when the stream ended without it."""
        async for data in reply.content.iter_any():
            if await self._pass_on(self._parser.feed(data)):
                return True
        return await self._pass_on(self._parser.finish())

    async def _pass_on(self, events: list[bytes]) -> bool:
        """Records events and sends on what the agent is to see; True after the last. MalformedReply after an event that
        is an error or none at all; what came before it was sent."""
        call = self._call
        asked, requested = call.prepared.asked, call.requested_model
        out = []
        problem: MalformedReply | None = None
        done = False
        for data in events:
            if data == DONE:
                done = True
                break
            try:
                chunk = _chunk(data, call)
                call.capture.chunk(chunk)
                if strip_chunk(chunk, asked, requested):
                    out.append(event(_written(chunk)))
            except MalformedReply as found:
                problem = found
                break
        if out:
            if call.first_chunk is None:
                call.first_chunk = time.time_ns()
            call.sent += out
            self._metrics.chunks.inc(len(out))
            await self._response.write(b"".join(out))
        elif self._parser.comments and not done:
            await self._response.write(COMMENT)
        self._parser.comments = 0
        if problem is not None:
            raise problem
        return done


def _chunk(data: bytes, call: Call) -> Json:
    chunk = _parsed(data, call)
    if "error" in chunk and "choices" not in chunk:
        raise MalformedReply(normalised_error(500, data)["message"])
    return chunk


def _parsed(raw: bytes, call: Call) -> Json:
    """JSON of a reply or chunk; a long list of prompt ids, unless the agent is to see it, goes its own way."""
    if call.model.trained and not call.prepared.asked.token_ids:
        raw, ids = call.session.prompts.cut(raw)
        if ids is not None:
            call.capture.prompt(ids)
    try:
        parsed: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise MalformedReply(f"not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise MalformedReply("not an object")
    return parsed


def _written(reply: Json) -> bytes:
    """JSON can be read deeper than it can be written."""
    try:
        return orjson.dumps(reply)
    except orjson.JSONEncodeError as error:
        raise MalformedReply(f"nested too deep: {error}") from None


async def _error(reply: aiohttp.ClientResponse, call: Call) -> Refusal:
    """The model server's error for the agent, in OpenAI's shape; what is beyond `MAX_ERROR_BYTES` is not read."""
    body = bytearray()
    try:
        while len(body) < MAX_ERROR_BYTES and (piece := await reply.content.read(MAX_ERROR_BYTES - len(body))):
            body += piece
    except aiohttp.ClientError:
        body.clear()
    status = reply.status
    if status in (401, 403) and not call.model.trained:
        _log.error("the endpoint of model %s refuses the gateway's key (%d)", call.model.name, status)
        return upstream_failed("the model's endpoint does not accept the gateway's key", "upstream_credential")
    if status < 400:
        return upstream_failed(f"the model server answered {status}", "upstream_malformed")
    return UpstreamRefusal(status, normalised_error(status, bytes(body)), reply.headers.get("Retry-After"))


async def _read_to_end(reply: aiohttp.ClientResponse) -> None:
    """What follows the last event, so that the connection can be used again; a server that does not end its reply
    loses the connection instead."""
    try:
        async with asyncio.timeout(AFTER_DONE_SECONDS):
            while await reply.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError):
        reply.close()
