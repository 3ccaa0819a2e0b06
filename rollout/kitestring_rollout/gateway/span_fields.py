"""What an export request of spans will cost to parse, told from its bytes: an attribute of two bytes becomes hundreds.

Protobuf makes an object of each message before anything can be looked at, so the fields are counted on the wire.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from google.protobuf.descriptor import Descriptor
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

Messages: TypeAlias = "dict[int, Messages]"
"""The messages within a message, by field number."""

SMALL_BYTES: Final = 64
"""An attribute of no more counts as one field, whatever it holds: most are so, and most of a request is attributes."""

_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: 8, 5: 4}
"""Bytes of a field, by its wire type."""
_MORE = 0x80
"""A byte of a number that is not its last."""


class MalformedRequest(ValueError):
    """The bytes are no protobuf message."""


def _messages_of(descriptor: Descriptor, known: dict[str, Messages]) -> Messages:
    found = known.get(descriptor.full_name)
    if found is None:
        found = known[descriptor.full_name] = {}  # before its parts: values may hold values
        for field in descriptor.fields:
            if field.message_type is not None:
                found[field.number] = _messages_of(field.message_type, known)
    return found


_KNOWN: Final[dict[str, Messages]] = {}
_REQUEST: Final = _messages_of(ExportTraceServiceRequest.DESCRIPTOR, _KNOWN)
_ATTRIBUTE: Final = _KNOWN[KeyValue.DESCRIPTOR.full_name]


def count_fields(data: bytes, most: int) -> int:
    """The fields of a serialised `ExportTraceServiceRequest` and of all messages in it; some number above `most` as
    soon as there are more than that. MalformedRequest."""
    count = 0
    parts = [(0, len(data), _REQUEST)]
    try:
        while parts:
            at, end, messages = parts.pop()
            while at < end:
                count += 1
                if count > most:
                    return count
                tag = data[at]
                at += 1
                if tag >= _MORE:
                    tag, at = _varint(data, at - 1)
                kind = tag & 7
                if kind == _BYTES:
                    size = data[at]
                    at += 1
                    if size >= _MORE:
                        size, at = _varint(data, at - 1)
                    within = messages.get(tag >> 3)
                    if within is not None and (size > SMALL_BYTES or within is not _ATTRIBUTE):
                        parts.append((at, at + size, within))
                    at += size
                elif kind == _VARINT:
                    _, at = _varint(data, at)
                elif kind in _FIXED:
                    at += _FIXED[kind]
                else:
                    raise MalformedRequest(f"wire type {kind}")
            if at > end:
                raise MalformedRequest("a field is longer than its message")
    except IndexError:
        raise MalformedRequest("the message is cut off") from None
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends. Those of one byte, which most are, are read without it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < _MORE:
            return value, at
        shift += 7
        if shift >= 70:
            raise MalformedRequest("a number is longer than ten bytes")
