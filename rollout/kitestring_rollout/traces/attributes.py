"""Attributes of gateway spans, serialised: what a viewer shows of a call."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

from kitestring_rollout.traces import conventions as names
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, Json
from kitestring_rollout.traces.wire import field, varint

OPERATIONS = {"chat": "chat", "completions": "text_completion"}
"""`gen_ai.operation.name` of each API."""
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def call_attributes(record: CallRecord) -> list[bytes]:
    """Those of a call."""
    attributes = [
        _operation(record.api),
        number(names.SEQ, record.seq),
        _models(record.outcome, record.requested_model, record.model, record.trained),
    ]
    if record.agent is not None:
        attributes.append(text(names.AGENT_NAME, record.agent))
    if record.nonconforming:
        attributes.append(texts(names.NONCONFORMING, record.nonconforming))
    _sampling_attributes(attributes, record.sampling)
    _reply_attributes(attributes, record)
    return attributes


@functools.lru_cache(maxsize=4)
def _operation(api: str) -> bytes:
    return text(names.OPERATION, OPERATIONS[api]) + text(names.PROVIDER_NAME, names.PROVIDER)


@functools.lru_cache(maxsize=1024)
def _models(outcome: str, requested: str, model: str, trained: bool) -> bytes:
    """A run has few of these."""
    return b"".join(
        (
            text(names.OUTCOME, outcome),
            text(names.REQUEST_MODEL, requested),
            text(names.RESPONSE_MODEL, model),
            flag(names.TRAINED, trained),
        )
    )


def _sampling_attributes(attributes: list[bytes], sampling: Json) -> None:
    temperature = sampling.get("temperature")
    if isinstance(temperature, (int, float)):
        attributes.append(real(names.TEMPERATURE, temperature))
    for key, name in (("max_tokens", names.MAX_TOKENS), ("seed", names.SEED)):
        value = sampling.get(key)
        if type(value) is int and _INT64_MIN <= value <= _INT64_MAX:
            attributes.append(number(name, value))


def _reply_attributes(attributes: list[bytes], record: CallRecord) -> None:
    if record.status is not None:
        attributes.append(number(names.STATUS_CODE, record.status))
    if record.response_id is not None:
        attributes.append(text(names.RESPONSE_ID, record.response_id))
    if record.prompt_tokens is not None:
        attributes.append(number(names.INPUT_TOKENS, record.prompt_tokens))
    if record.completion_tokens is not None:
        attributes.append(number(names.OUTPUT_TOKENS, record.completion_tokens))
    if record.choices:
        reasons = tuple([choice.finish_reason or "" for choice in record.choices])
        attributes.append(_FINISHED.get(reasons) or texts(names.FINISH_REASONS, reasons))
        versions = {span.version for choice in record.choices for span in choice.versions}
        if versions:
            attributes.append(text(names.POLICY_VERSION, ",".join(sorted(versions))))
        if len(record.choices) > 1:
            attributes.append(number(names.CHOICE_COUNT, len(record.choices)))
    if record.streamed:
        attributes.append(flag(names.STREAM, True))
        if record.first_chunk_unix_nano is not None:
            seconds = (record.first_chunk_unix_nano - record.started_unix_nano) / 1e9
            attributes.append(real(names.FIRST_CHUNK_SECONDS, seconds))


def identity_attributes(identity: AttemptIdentity) -> bytes:
    """The attributes that are the same in every span of the attempt."""
    return b"".join(
        (
            text(names.RUN, identity.run),
            text(names.ROLLOUT, identity.rollout),
            text(names.ATTEMPT, identity.attempt),
            text(names.CONVERSATION, identity.attempt),
            text(names.GROUP, identity.group),
            text(names.MODE, identity.mode),
            number(names.TASK, identity.task),
            number(names.STEP, identity.step),
        )
    )


# Field numbers of opentelemetry/proto: Span.attributes, KeyValue, AnyValue and ArrayValue.
_ATTRIBUTES = b"\x4a"  # 9, of a span
_KEY = b"\x0a"  # 1
_VALUE = b"\x12"  # 2
_STRING = b"\x0a"  # 1
_BOOL = b"\x10"  # 2
_INT = b"\x18"  # 3
_DOUBLE = struct.Struct("<cd")  # 4
_DOUBLE_TAG = b"\x21"
_ARRAY = b"\x2a"  # 5
_VALUES = b"\x0a"  # 1


def text(name: str, value: str) -> bytes:
    """An attribute of a span, serialised, as by all functions below."""
    data = value.encode()
    return _attribute(name, _STRING + varint(len(data)), data)


@functools.lru_cache(maxsize=8192)
def number(name: str, value: int) -> bytes:
    """ValueError for one that does not fit 64 bits."""
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise ValueError(f"{name}: {value} does not fit an attribute")
    return _attribute(name, _INT, varint(value if value >= 0 else value + (1 << 64)))


def real(name: str, value: float) -> bytes:
    return _attribute(name, b"", _DOUBLE.pack(_DOUBLE_TAG, value))


def flag(name: str, value: bool) -> bytes:
    return _attribute(name, _BOOL, b"\x01" if value else b"\x00")


def texts(name: str, values: Sequence[str]) -> bytes:
    data = b"".join([field(_VALUES, field(_STRING, value.encode())) for value in values])
    return _attribute(name, _ARRAY + varint(len(data)), data)


def _attribute(name: str, head: bytes, data: bytes) -> bytes:
    """`head` and `data` make the value; a long one is copied once."""
    key = _key(name)
    size = len(head) + len(data)
    length = varint(size)
    return b"".join((_ATTRIBUTES, varint(len(key) + len(length) + size), key, length, head, data))


@functools.lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    """All of a key and value but the value."""
    return field(_KEY, name.encode()) + _VALUE


_FINISHED: dict[tuple[str, ...], bytes] = {
    (reason,): texts(names.FINISH_REASONS, (reason,)) for reason in ("stop", "length", "tool_calls")
}
