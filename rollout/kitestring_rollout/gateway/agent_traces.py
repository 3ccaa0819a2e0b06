"""Agents' own spans: stripped of claimed identity, stamped with the token's, passed on to the untrusted pipeline."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import aiohttp
from aiohttp import web
from aiohttp.hdrs import CONTENT_ENCODING
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kitestring_rollout.gateway.bodies import BodyMemory, Held, decompress, read
from kitestring_rollout.gateway.errors import Refusal, upstream_failed
from kitestring_rollout.gateway.metrics import Metrics
from kitestring_rollout.gateway.session import Session
from kitestring_rollout.gateway.span_fields import MalformedRequest, count_fields
from kitestring_rollout.traces import conventions
from kitestring_rollout.traces.records import AttemptIdentity

PROTOBUF: Final = "application/x-protobuf"
OWN_PREFIX: Final = "kitestring."
"""Attributes under this name are the gateway's to write: an agent's are taken out wherever they stand."""
FORWARD_SECONDS: Final = 10.0
MAX_FIELDS: Final = 100_000
"""Of one request: a full batch of 512 spans with 40 attributes each has 70,000 at most."""
MAX_RESOURCES: Final = 64
"""Of one request: an agent is one, and each gets the whole identity."""
FIELD_BYTES: Final = 16
"""A field counts as so many bytes at least: what costs next to nothing to send costs the gateway time."""


class AgentTraces:
    """Forwards to the collector's untrusted route."""

    def __init__(
        self, client: aiohttp.ClientSession, endpoint: str, credential: str | None, metrics: Metrics, bodies: BodyMemory
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._headers = {"Content-Type": PROTOBUF}
        if credential is not None:
            self._headers["Authorization"] = f"Bearer {credential}"
        self._metrics = metrics
        self._bodies = bodies

    async def serve(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        """POST {base}/otlp/v1/traces. 200 when the collector has taken the spans."""
        if request.content_type != PROTOBUF:
            raise Refusal(415, "unsupported_media_type", f"spans are taken as {PROTOBUF} (OTLP over HTTP)")
        held = Held(self._bodies, session.bodies)
        try:
            return await self._forward(request, session, held)
        finally:
            held.release()

    async def _forward(self, request: web.BaseRequest, session: Session, held: Held) -> web.StreamResponse:
        left = session.attempt.limits.agent_span_bytes - session.attempt.span_bytes
        data = decompress(await read(request, left, held), request.headers.get(CONTENT_ENCODING), left)
        held.take(len(data))
        session.attempt.take_span_bytes(max(len(data), FIELD_BYTES * _fields(data)))
        body = restamp(data, session.identity)
        try:
            async with (
                asyncio.timeout(FORWARD_SECONDS),
                self._client.post(self._endpoint, data=body, headers=self._headers) as reply,
            ):
                answer = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise upstream_failed(f"the collector did not answer: {type(error).__name__}", "collector", 503) from None
        if reply.status >= 500 or reply.status == 429:
            raise upstream_failed(f"the collector answered {reply.status}", "collector", 503)
        if reply.status != 200:
            raise Refusal(400, "spans_refused", f"the collector refused the spans ({reply.status})")
        self._metrics.agent_span_bytes.inc(len(data))
        return web.Response(body=answer, content_type=PROTOBUF)


def restamp(data: bytes, identity: AttemptIdentity) -> bytes:
    """An export request with the token's identity in place of whatever identity it claims; Refusal 400."""
    try:
        request = ExportTraceServiceRequest.FromString(data)
    except DecodeError:
        raise _invalid() from None
    if len(request.resource_spans) > MAX_RESOURCES:
        raise _too_many(f"{MAX_RESOURCES} resources")
    if OWN_PREFIX.encode() in data:
        _strip_all(request)
    for resource_spans in request.resource_spans:
        attributes = resource_spans.resource.attributes
        for name, value in (
            (conventions.RUN, identity.run),
            (conventions.ROLLOUT, identity.rollout),
            (conventions.ATTEMPT, identity.attempt),
            (conventions.GROUP, identity.group),
            (conventions.MODE, identity.mode),
        ):
            attributes.add(key=name).value.string_value = value
        for name, number in ((conventions.TASK, identity.task), (conventions.STEP, identity.step)):
            attributes.add(key=name).value.int_value = number
    stamped: bytes = request.SerializeToString()
    return stamped


def _fields(data: bytes) -> int:
    """Refusal 413 when there are too many to be parsed, 400 when they cannot be."""
    try:
        fields = count_fields(data, MAX_FIELDS)
    except MalformedRequest:
        raise _invalid() from None
    if fields > MAX_FIELDS:
        raise _too_many(f"{MAX_FIELDS} fields")
    return fields


def _too_many(bound: str) -> Refusal:
    return Refusal(413, "body_too_large", f"the request holds more than {bound}: send fewer spans at a time")


def _invalid() -> Refusal:
    return Refusal(400, "invalid_spans", "the body is no OTLP ExportTraceServiceRequest")


def _strip_all(request: ExportTraceServiceRequest) -> None:
    """Deletes attributes of our own namespace wherever they stand."""
    for resource_spans in request.resource_spans:
        _strip(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            _strip(scope_spans.scope.attributes)
            for span in scope_spans.spans:
                _strip(span.attributes)
                for event in span.events:
                    _strip(event.attributes)
                for link in span.links:
                    _strip(link.attributes)


def _strip(attributes: Any) -> None:
    kept = [attribute for attribute in attributes if not attribute.key.startswith(OWN_PREFIX)]
    if len(kept) < len(attributes):
        del attributes[:]
        attributes.extend(kept)
