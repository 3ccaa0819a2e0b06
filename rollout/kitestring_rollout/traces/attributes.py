"""Attributes of gateway spans: what a viewer shows of a call."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kitestring_rollout.traces import conventions as names
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, Json

OPERATIONS = {"chat": "chat", "completions": "text_completion"}
"""`gen_ai.operation.name` of each API."""
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def call_attributes(attributes: Any, record: CallRecord) -> None:
    """Add those of a call to a span's `attributes`."""
    text_attribute(attributes, names.OPERATION, OPERATIONS[record.api])
    text_attribute(attributes, names.PROVIDER_NAME, names.PROVIDER)
    number_attribute(attributes, names.SEQ, record.seq)
    text_attribute(attributes, names.OUTCOME, record.outcome)
    text_attribute(attributes, names.REQUEST_MODEL, record.requested_model)
    text_attribute(attributes, names.RESPONSE_MODEL, record.model)
    value_attribute(attributes, names.TRAINED).bool_value = record.trained
    if record.agent is not None:
        text_attribute(attributes, names.AGENT_NAME, record.agent)
    if record.nonconforming:
        texts_attribute(attributes, names.NONCONFORMING, record.nonconforming)
    _sampling_attributes(attributes, record.sampling)
    _reply_attributes(attributes, record)


def _sampling_attributes(attributes: Any, sampling: Json) -> None:
    temperature = sampling.get("temperature")
    if isinstance(temperature, (int, float)):
        value_attribute(attributes, names.TEMPERATURE).double_value = temperature
    for key, name in (("max_tokens", names.MAX_TOKENS), ("seed", names.SEED)):
        value = sampling.get(key)
        if type(value) is int and _INT64_MIN <= value <= _INT64_MAX:
            number_attribute(attributes, name, value)


def _reply_attributes(attributes: Any, record: CallRecord) -> None:
    if record.status is not None:
        number_attribute(attributes, names.STATUS_CODE, record.status)
    if record.response_id is not None:
        text_attribute(attributes, names.RESPONSE_ID, record.response_id)
    if record.prompt_tokens is not None:
        number_attribute(attributes, names.INPUT_TOKENS, record.prompt_tokens)
    if record.completion_tokens is not None:
        number_attribute(attributes, names.OUTPUT_TOKENS, record.completion_tokens)
    if record.choices:
        texts_attribute(attributes, names.FINISH_REASONS, [choice.finish_reason or "" for choice in record.choices])
        versions = sorted({span.version for choice in record.choices for span in choice.versions})
        if versions:
            text_attribute(attributes, names.POLICY_VERSION, ",".join(versions))
        if len(record.choices) > 1:
            number_attribute(attributes, names.CHOICE_COUNT, len(record.choices))
    if record.streamed:
        value_attribute(attributes, names.STREAM).bool_value = True
        if record.first_chunk_unix_nano is not None:
            seconds = (record.first_chunk_unix_nano - record.started_unix_nano) / 1e9
            value_attribute(attributes, names.FIRST_CHUNK_SECONDS).double_value = seconds


def identity_attributes(identity: AttemptIdentity) -> bytes:
    """The attributes that are the same in every span of the attempt, serialised once."""
    span = Span()
    for name, value in (
        (names.RUN, identity.run),
        (names.ROLLOUT, identity.rollout),
        (names.ATTEMPT, identity.attempt),
        (names.CONVERSATION, identity.attempt),
        (names.GROUP, identity.group),
        (names.MODE, identity.mode),
    ):
        text_attribute(span.attributes, name, value)
    number_attribute(span.attributes, names.TASK, identity.task)
    number_attribute(span.attributes, names.STEP, identity.step)
    data: bytes = span.SerializeToString()
    return data


def value_attribute(attributes: Any, name: str) -> Any:
    """Add an attribute without a value, and give its `AnyValue` to set."""
    return attributes.add(key=name).value


def text_attribute(attributes: Any, name: str, value: str) -> None:
    attributes.add(key=name).value.string_value = value


def number_attribute(attributes: Any, name: str, value: int) -> None:
    attributes.add(key=name).value.int_value = value


def texts_attribute(attributes: Any, name: str, values: Any) -> None:
    array = attributes.add(key=name).value.array_value
    for value in values:
        array.values.add(string_value=value)
