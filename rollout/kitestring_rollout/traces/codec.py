"""A call's training data as one string: a JSON head and packed arrays, zstd where it pays, base64.

Payload string = `r` (raw) or `z` (zstd) + base64 of: uint32 length of the head, head (JSON), arrays (little-endian;
int32 token ids, float32 logprobs) in the order in which the head counts them. It holds everything that training reads,
so its hash proves it; contents (messages) lie beside it, bound to it by a hash in the head.
"""

from __future__ import annotations

import hashlib
import struct
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
import zstandard

from kitestring_rollout.traces.records import Json

ZSTD_FROM_BYTES = 2048
"""Below this zstd costs more time than the bytes are worth."""
MAX_DECODED_BYTES = 1 << 30

_LENGTH = struct.Struct("<I")
_INT32 = np.dtype("<i4")


class PayloadCorrupt(ValueError):
    """A payload is not what was written: wrong hash, cut short, or not a payload at all."""


def pack(head: Json, arrays: Iterable[bytes]) -> str:
    """The payload string of a head and the bytes of its arrays."""
    text = orjson.dumps(head)
    body = b"".join((_LENGTH.pack(len(text)), text, *arrays))
    if len(body) >= ZSTD_FROM_BYTES:
        # A compressor is not safe to share between threads, and costs 2 µs to make.
        return "z" + b2a_base64(zstandard.ZstdCompressor(level=1).compress(body), newline=False).decode("ascii")
    return "r" + b2a_base64(body, newline=False).decode("ascii")


def unpack(payload: str) -> tuple[Json, memoryview]:
    """Head and array bytes of a payload string; raises `PayloadCorrupt`."""
    try:
        body = a2b_base64(payload[1:], strict_mode=True)
        if payload[:1] == "z":
            if zstandard.frame_content_size(body) > MAX_DECODED_BYTES:
                raise PayloadCorrupt("the payload claims more than a GiB")
            body = zstandard.ZstdDecompressor().decompress(body)
        elif payload[:1] != "r":
            raise PayloadCorrupt(f"unknown form {payload[:1]!r} of a payload")
        (length,) = _LENGTH.unpack_from(body)
        head = orjson.loads(memoryview(body)[4 : 4 + length])
    except (Base64Error, ValueError, struct.error, zstandard.ZstdError) as error:
        raise PayloadCorrupt(f"unreadable payload: {error}") from error
    if not isinstance(head, dict):
        raise PayloadCorrupt("the head of the payload is not an object")
    return head, memoryview(body)[4 + length :]


class ArrayReader:
    """Takes arrays off the front of a payload's array bytes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, count: int, dtype: str) -> np.ndarray[Any, Any]:
        """The next `count` numbers of little-endian `dtype`, read-only; raises `PayloadCorrupt` when cut short."""
        size = 4 * count
        if count < 0 or size > len(self._data):
            raise PayloadCorrupt("the arrays of the payload are cut short")
        taken, self._data = self._data[:size], self._data[size:]
        return np.frombuffer(taken, dtype=dtype)

    def finish(self) -> None:
        if len(self._data):
            raise PayloadCorrupt("the payload has bytes that belong to no array")


def payload_sha256(kind: str, trace_id: bytes, epoch: str, seq: int, payload: str) -> bytes:
    """Hash of a payload bound to its place: the same payload elsewhere has another hash. 32 bytes."""
    return hashlib.sha256(f"{kind}:{trace_id.hex()}:{epoch}:{seq}:{payload}".encode()).digest()


def digest(hashes: Iterable[bytes]) -> str:
    """Hex sha256 over the payload hashes of calls 1..N in order: what `rollout.end` says of the calls."""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def contents_sha256(contents: Sequence[str]) -> str:
    """Hex hash over the content attributes of a span, in order."""
    hasher = hashlib.sha256()
    for text in contents:
        data = text.encode()
        hasher.update(_LENGTH.pack(len(data)))
        hasher.update(data)
    return hasher.hexdigest()


def shared_ids(first: bytes, second: bytes) -> int:
    """Length in ids of the common beginning of two packed int32 arrays."""
    if second.startswith(first):
        return len(first) // 4
    if first[:4] != second[:4] or not second:
        return 0
    size = min(len(first), len(second)) // 4
    differs = np.frombuffer(first, _INT32, size) != np.frombuffer(second, _INT32, size)
    return int(differs.argmax()) or size  # the first ids are equal, so 0 means that none differs
