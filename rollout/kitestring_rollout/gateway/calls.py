"""One call of an agent, from its request to its record: admission, hold, upstream, delivery, settlement."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from kitestring_api import names
from kitestring_rollout.gateway.attempts import State
from kitestring_rollout.gateway.capture import (
    Capture,
    Captured,
    MalformedReply,
    strip_chunk,
    strip_whole,
    trainable,
)
from kitestring_rollout.gateway.errors import Refusal, error_body, normalised_error, upstream_failed
from kitestring_rollout.gateway.holds import Gates
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.models import Model, Models
from kitestring_rollout.gateway.ready import JSON_HEAD, STREAM_HEAD, ReadyResponse, flushing_transport
from kitestring_rollout.gateway.request import CallRules, Prepared, prepare, read_body
from kitestring_rollout.gateway.retries import Answer, Entry, ReplayMemory, body_key
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.gateway.stream import COMMENT, DONE, DONE_EVENT, EventParser, event
from kitestring_rollout.gateway.upstream import Upstream
from kitestring_rollout.traces.records import Api, CallRecord, Json

_log = logging.getLogger(__name__)

STREAM_HEADERS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
MAX_LABEL: Final = 128
AFTER_DONE_SECONDS: Final = 1.0


@dataclass(slots=True, eq=False)
class _Call:
    """An admitted call."""

    session: Session
    seq: int
    api: Api
    model: Model
    requested_model: str
    prepared: Prepared
    agent: str | None
    entry: Entry
    capture: Capture
    started: int
    first_chunk: int | None = None
    version: str | None = None
    status: int | None = None
    error: str | None = None
    finished: bool = False
    """The model server's reply is complete."""
    begun: bool = False
    """Something of the reply was sent to the agent."""
    delivered: bool = False
    sent: list[bytes] = field(default_factory=list)
    """What the agent got of a stream."""


class Calls:
    """Serves the calls of all attempts."""

    def __init__(
        self,
        *,
        models: Models,
        upstream: Upstream,
        gates: Gates,
        memory: ReplayMemory,
        metrics: Metrics,
        rules: CallRules,
    ) -> None:
        self._models = models
        self._upstream = upstream
        self._gates = gates
        self._memory = memory
        self._metrics = metrics
        self._rules = rules

    async def serve(self, request: web.BaseRequest, session: Session, api: Api) -> web.StreamResponse:
        """Answers a call; raises Refusal for one that is not admitted, and for one that fails before anything of its
        reply was sent."""
        raw = await request.read()
        attempt = session.attempt
        attempt.check_open()
        task = request.task
        session.enter(task)
        call: _Call | None = None
        try:
            key = body_key(api, raw)
            idempotency = request.headers.get(names.HEADER_IDEMPOTENCY)
            is_retry = request.headers.get(names.HEADER_RETRY_COUNT, "0") != "0"
            if is_retry or idempotency is not None:
                replayed = await self._repeat(request, session, key, idempotency, is_retry)
                if replayed is not None:
                    return replayed
                attempt.check_open()
            body = read_body(raw)
            requested, model = self._models.named_in(body)
            prepared = prepare(body, api, model, session.identity.mode, self._rules)
            seq = attempt.admit(model.name, frozen=not model.trained)
            self._metrics.total_calls += 1
            entry = Entry(seq, key, idempotency)
            session.recent.add(entry)
            call = _Call(
                session=session,
                seq=seq,
                api=api,
                model=model,
                requested_model=requested,
                prepared=prepared,
                agent=_label(request.headers.get(names.HEADER_AGENT)),
                entry=entry,
                capture=Capture(api),
                started=time.time_ns(),
            )
            return await self._run(request, call)
        except ConnectionResetError as gone:
            raise asyncio.CancelledError from gone  # aiohttp takes this for what it is: nobody is there to answer
        except asyncio.CancelledError:
            if attempt.state is State.OPEN or (call is not None and call.begun):
                raise  # the agent went away, or gets no more than it has got
            task.uncancel()
            raise Refusal(410, "attempt_closed", "the attempt has been closed") from None
        finally:
            session.leave(task)

    async def _repeat(
        self,
        request: web.BaseRequest,
        session: Session,
        key: tuple[str, int, int],
        idempotency: str | None,
        is_retry: bool,
    ) -> web.StreamResponse | None:
        """The reply of the call that this request repeats, or None when it repeats none."""
        entry = session.recent.find(key, idempotency, is_retry)
        if entry is None:
            return None
        await entry.wait()
        answer = entry.answer
        if answer is None:
            return None
        response = ReadyResponse(answer.head, answer.body)
        await response.prepare(request)
        self._metrics.replayed.inc()
        if not entry.delivered:
            entry.delivered = True
            session.deliver_late(entry.seq)
        return response

    async def _run(self, request: web.BaseRequest, call: _Call) -> web.StreamResponse:
        gate = self._gates.find(call.model.name) if call.model.trained else None
        entered = False
        outcome = "failed"
        try:
            if gate is not None:
                await gate.enter()
                entered = True
            reply = await self._upstream.post(
                call.model, call.api, call.prepared.payload, call.session.identity.attempt
            )
            try:
                call.version = reply.headers.get(names.HEADER_POLICY_VERSION)
                if reply.status != 200:
                    raise await self._upstream_error(reply, call)
                if call.prepared.stream:
                    response = await self._relay_stream(request, reply, call)
                else:
                    response = await self._relay_whole(request, reply, call)
            finally:
                if call.finished:
                    reply.release()
                else:
                    reply.close()  # aborts the generation
            if call.error is None:
                outcome = "ok"
            return response
        except Refusal as refusal:
            call.status, call.error = refusal.status, refusal.message
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            if call.delivered:
                outcome = "ok"
            else:
                outcome = "undelivered" if call.finished else "cancelled"
                closed = call.session.attempt.state is not State.OPEN
                call.error = "the attempt was closed" if closed else "the agent went away"
            raise
        except BaseException as bug:
            call.status, call.error = 500, type(bug).__name__
            raise
        finally:
            if gate is not None and entered:
                gate.leave()
            self._settle(call, outcome)

    async def _relay_whole(
        self, request: web.BaseRequest, reply: aiohttp.ClientResponse, call: _Call
    ) -> web.StreamResponse:
        try:
            raw = await reply.read()
        except TimeoutError:
            raise upstream_failed("the model server did not answer in time", "upstream_timeout", 504) from None
        except aiohttp.ClientError as error:
            raise upstream_failed(f"the model server's reply broke off: {type(error).__name__}") from error
        try:
            body = _parsed(raw, call)
            if not isinstance(body, dict):
                raise MalformedReply("the reply is not an object")
            call.capture.whole(body)
        except ValueError as error:  # of JSON or of shape
            raise upstream_failed(f"the model server's reply cannot be read: {error}", "upstream_malformed") from None
        strip_whole(body, call.prepared.asked, call.requested_model)
        answer = Answer(JSON_HEAD, orjson.dumps(body))
        call.finished = True
        call.entry.stop(answer)
        call.status = 200
        call.begun = True
        response = ReadyResponse(answer.head, answer.body)
        await response.prepare(request)
        call.delivered = True
        return response

    async def _relay_stream(
        self, request: web.BaseRequest, reply: aiohttp.ClientResponse, call: _Call
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=200, headers=STREAM_HEADERS)
        response.enable_chunked_encoding()
        flushing_transport(request)
        await response.prepare(request)
        call.status = 200
        call.begun = True
        parser = EventParser()
        done = False
        try:
            async for data in reply.content.iter_any():
                done = await self._pass_on(parser, parser.feed(data), response, call)
                if done:
                    break
            else:
                done = await self._pass_on(parser, parser.finish(), response, call)
            if not done and call.error is None:
                call.error = "the model server's stream broke off"
        except TimeoutError:
            call.error = "the model server did not end its stream in time"
        except aiohttp.ClientPayloadError:
            call.error = "the model server's stream broke off"
        except aiohttp.ClientConnectionResetError:
            raise  # our own side: the agent went away
        except aiohttp.ClientError as error:
            call.error = f"the model server's stream broke off: {type(error).__name__}"
        except MalformedReply as error:
            call.error = f"the model server's stream cannot be read: {error}"
        if call.error is not None:
            return await self._break_stream(request, response, call)
        call.finished = True
        call.entry.stop(Answer(STREAM_HEAD, b"".join((*call.sent, DONE_EVENT))))
        await response.write_eof(DONE_EVENT)
        call.delivered = True
        await _read_to_end(reply)
        return response

    async def _pass_on(
        self, parser: EventParser, events: list[bytes], response: web.StreamResponse, call: _Call
    ) -> bool:
        """Records events and sends on what the agent is to see; True after the last."""
        asked, requested = call.prepared.asked, call.requested_model
        out = []
        done = False
        for data in events:
            if data == DONE:
                done = True
                break
            try:
                chunk: Json = _parsed(data, call)
            except orjson.JSONDecodeError:
                raise MalformedReply("an event is not JSON") from None
            if not isinstance(chunk, dict):
                raise MalformedReply("an event is not an object")
            if "error" in chunk and "choices" not in chunk:
                call.error = str(normalised_error(500, data)["message"])
                break
            call.capture.chunk(chunk)
            if strip_chunk(chunk, asked, requested):
                out.append(event(orjson.dumps(chunk)))
        if out:
            if call.first_chunk is None:
                call.first_chunk = time.time_ns()
            call.sent += out
            self._metrics.chunks.inc(len(out))
            await response.write(b"".join(out))
        elif parser.comments and not done:
            await response.write(COMMENT)
        parser.comments = 0
        return done or call.error is not None

    async def _break_stream(
        self, request: web.BaseRequest, response: web.StreamResponse, call: _Call
    ) -> web.StreamResponse:
        """Tells the agent that the stream failed, as an event and by the connection's end without the body's."""
        message = call.error or "the stream failed"
        await response.write(event(error_body(message, "server_error", "upstream_failed")))
        if request.transport is not None:
            request.transport.close()
        return response

    async def _upstream_error(self, reply: aiohttp.ClientResponse, call: _Call) -> Refusal:
        """The model server's error for the agent, in OpenAI's shape."""
        try:
            body = await reply.read()
        except (aiohttp.ClientError, TimeoutError):
            body = b""
        call.finished = True
        status = reply.status
        if status in (401, 403) and not call.model.trained:
            _log.error("the endpoint of model %s refuses the gateway's key (%d)", call.model.name, status)
            return upstream_failed("the model's endpoint does not accept the gateway's key", "upstream_credential")
        if status < 400:
            return upstream_failed(f"the model server answered {status}", "upstream_malformed")
        return UpstreamRefusal(status, normalised_error(status, body), reply.headers.get("Retry-After"))

    def _settle(self, call: _Call, outcome: str) -> None:
        """Takes the call out of flight and records it; one that may still be fetched by a retry waits for that."""
        session, model, metrics = call.session, call.model, self._metrics
        captured = call.capture.result(trained=model.trained, version=call.version)
        prompt_tokens, completion_tokens = _tokens(call, captured)
        session.attempt.leave(
            model.name, frozen=not model.trained, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )
        identity = session.identity
        prepared = call.prepared
        record = CallRecord(
            identity=identity,
            seq=call.seq,
            api=call.api,
            model=model.name,
            requested_model=call.requested_model,
            trained=model.trained,
            outcome=outcome,  # type: ignore[arg-type]
            started_unix_nano=call.started,
            ended_unix_nano=time.time_ns(),
            streamed=prepared.stream,
            status=call.status,
            error=call.error,
            agent=call.agent,
            first_chunk_unix_nano=call.first_chunk,
            sampling=prepared.sampling,
            nonconforming=prepared.nonconforming,
            prompt_token_ids=captured.prompt_token_ids,
            choices=captured.choices,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            response_id=captured.response_id,
            messages=prepared.messages,
            tools=prepared.tools,
        )
        entry = call.entry
        if outcome == "undelivered" and entry.answer is not None:
            session.undelivered[call.seq] = record
            self._memory.keep(entry, session.recent)
        else:
            if outcome == "ok":
                entry.delivered = True
                self._memory.keep(entry, session.recent)
                session.attempt.hear(captured.last_message, trained=model.trained)
                if model.trained and not trainable(captured):
                    metrics.untrainable.inc()
            else:
                entry.stop(None)
                session.recent.forget(entry)
            session.record(record)
        metrics.calls[outcome].inc()
        metrics.seconds.observe((record.ended_unix_nano - record.started_unix_nano) / 1e9)
        if prepared.nonconforming:
            metrics.nonconforming.inc()
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.completion_tokens.inc(completion_tokens)
        metrics.total_completion_tokens += completion_tokens


class UpstreamRefusal(Refusal):
    """An error of the model server itself, passed on."""

    def __init__(self, status: int, error: Json, retry_after: str | None) -> None:
        super().__init__(
            status,
            "upstream_error",
            error["message"],
            retry=status >= 500 or status == 429,
            headers={"Retry-After": retry_after} if retry_after is not None else None,
        )
        self._error = error

    def body(self) -> bytes:
        return orjson.dumps({"error": self._error})


async def _read_to_end(reply: aiohttp.ClientResponse) -> None:
    """What follows the last event, so that the connection can be used again; a server that does not end its reply
    loses the connection instead."""
    try:
        async with asyncio.timeout(AFTER_DONE_SECONDS):
            while await reply.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError):
        reply.close()


def _parsed(raw: bytes, call: _Call) -> Any:
    """JSON of a reply or chunk; a long list of prompt ids, unless the agent is to see it, goes its own way."""
    if call.model.trained and not call.prepared.asked.token_ids:
        raw, ids = call.session.prompts.cut(raw)
        if ids is not None:
            call.capture.prompt(ids)
    return orjson.loads(raw)


def _tokens(call: _Call, captured: Captured) -> tuple[int, int]:
    """Prompt and completion tokens of a call. A server that reports none, or a stream that an agent broke off before
    the usage came, must not be free: bytes / 4 and pieces of text stand in."""
    prompt, completion = captured.prompt_tokens, captured.completion_tokens
    if prompt is None:
        prompt = len(call.prepared.payload) // 4 if captured.choices else 0
    if completion is None:
        completion = call.capture.generated
    return prompt, completion


def _label(value: str | None) -> str | None:
    """The agent's name as a label, when it is a plain one."""
    if value is None or not value.isprintable() or not value.isascii():
        return None
    return value[:MAX_LABEL] or None
