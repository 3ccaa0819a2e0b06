"""Serves agents' calls: admission, hold, upstream, relay, settlement."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.hdrs import CONTENT_ENCODING

from kitestring_api import names
from kitestring_rollout.gateway.bodies import BodyMemory, Held, decompress, read, unfolding, widening
from kitestring_rollout.gateway.call import Call
from kitestring_rollout.gateway.capture import Capture
from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.holds import Gates
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.models import Models
from kitestring_rollout.gateway.ready import ReadyResponse
from kitestring_rollout.gateway.recorder import Recorder, settle
from kitestring_rollout.gateway.relay import relay
from kitestring_rollout.gateway.request import CallRules, prepare, read_body
from kitestring_rollout.gateway.retries import BodyKey, Entry, ReplayMemory, body_key
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.gateway.upstream import Upstream
from kitestring_rollout.traces.records import Api, Outcome

MAX_LABEL: Final = 128


class Calls:
    """Serves the calls of all attempts."""

    def __init__(
        self,
        *,
        models: Models,
        upstream: Upstream,
        gates: Gates,
        memory: ReplayMemory,
        recorder: Recorder,
        metrics: Metrics,
        rules: CallRules,
        bodies: BodyMemory,
    ) -> None:
        self._models = models
        self._upstream = upstream
        self._gates = gates
        self._memory = memory
        self._recorder = recorder
        self._metrics = metrics
        self._rules = rules
        self._bodies = bodies

    async def serve(self, request: web.BaseRequest, session: Session, api: Api) -> web.StreamResponse:
        """Answers a call; raises Refusal for one that is not admitted, and for one that fails before anything of its
        reply was sent."""
        held = Held(self._bodies, session.bodies)
        try:
            return await self._serve(request, session, api, held)
        finally:
            held.release()

    async def _serve(self, request: web.BaseRequest, session: Session, api: Api, held: Held) -> web.StreamResponse:
        encoding = request.headers.get(CONTENT_ENCODING)
        raw = await read(request, self._rules.max_body_bytes, held)
        if encoding is not None:
            raw = decompress(raw, encoding, self._rules.max_body_bytes)
            held.take(len(raw))
        unfolded = unfolding(raw)
        if unfolded:
            held.take(unfolded)
        session.attempt.check_open()
        key = body_key(api, raw)
        idempotency = request.headers.get(names.HEADER_IDEMPOTENCY)
        is_retry = request.headers.get(names.HEADER_RETRY_COUNT, "0") != "0"
        if is_retry or idempotency is not None:
            replayed = await self._repeat(request, session, session.recent.find(key, idempotency, is_retry))
            if replayed is not None:
                return replayed
        call = self._admit(request, session, api, raw, held, key=key, idempotency=idempotency)
        call.memory += unfolded
        del raw  # what is sent upstream takes its place in `held`
        return await self._run(request, call)

    def _admit(
        self,
        request: web.BaseRequest,
        session: Session,
        api: Api,
        raw: bytes,
        held: Held,
        *,
        key: BodyKey,
        idempotency: str | None,
    ) -> Call:
        body = read_body(raw)
        requested, model = self._models.named_in(body)
        attempt, frozen = session.attempt, not model.trained
        room = attempt.room(model.name, frozen=frozen)
        prepared = prepare(body, api, model, session.identity.mode, self._rules, room=room)
        widened = widening(prepared.payload)
        if widened:
            held.take(widened)
        seq = attempt.admit(model.name, frozen=frozen, reserve=prepared.reserve)
        self._metrics.total_calls += 1
        entry = Entry(seq, key, idempotency)
        session.recent.add(entry)
        return Call(
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
            memory=widened,
        )

    async def _repeat(
        self, request: web.BaseRequest, session: Session, entry: Entry | None
    ) -> web.StreamResponse | None:
        """The reply of the call that this request repeats, or None when there is none to repeat."""
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

    async def _run(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """From admission to settlement, which happens whatever becomes of the call."""
        outcome: Outcome = "failed"
        try:
            response = await self._pass(request, call)
            if call.error is None:
                outcome = "ok"
            return response
        except Refusal as refusal:
            call.status, call.error = refusal.status, f"{refusal.code}: {refusal.message}"
            refusal.admitted = True
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            outcome = call.end_early()
            raise
        except BaseException as bug:
            call.status, call.error = 500, type(bug).__name__
            raise
        finally:
            self._settle(call, outcome)

    async def _pass(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """Sends the call to its model's server and relays the reply."""
        gate = self._gates.find(call.model.name) if call.model.trained else None
        if gate is not None:
            await gate.enter()
        try:
            reply = await self._upstream.post(
                call.model, call.api, call.prepared.payload, call.session.identity.attempt, call.wait_for_server
            )
            call.waits_for_server = False
            call.version = reply.headers.get(names.HEADER_POLICY_VERSION)
            try:
                return await relay(request, reply, call, self._metrics)
            finally:
                _let_go(reply, call)
        finally:
            if gate is not None:
                gate.leave()

    def _settle(self, call: Call, outcome: Outcome) -> None:
        """Takes the call out of flight, to be recorded; one that a retry may still fetch waits for that."""
        session, entry = call.session, call.entry
        call.leave()
        if outcome == "undelivered" and session.can_wait(call.memory):
            settle(call, outcome, waits=True)
            self._memory.keep(entry, session.recent)
            return
        if outcome == "ok":
            entry.delivered = True
            self._memory.keep(entry, session.recent)
        else:
            entry.stop(None)
            session.recent.forget(entry)
        self._recorder.add(call, outcome)


def _let_go(reply: aiohttp.ClientResponse, call: Call) -> None:
    if call.finished:
        reply.release()
    else:
        reply.close()  # aborts the generation


def _label(value: str | None) -> str | None:
    """The agent's name as a label, when it is a plain one."""
    if value is None or not value.isprintable() or not value.isascii():
        return None
    return value[:MAX_LABEL] or None
