"""Bodies of agents' requests, bounded before and after decompression: small ones may unfold into gigabytes; and all of
them together, or agents by the thousand would take the gateway's memory."""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
from aiohttp import web

from kitestring_rollout.gateway.errors import Refusal, upstream_failed

SHARE: Final = 4
"""One attempt may hold a quarter of the memory: it cannot keep the others from theirs."""
SMALL_BYTES: Final = 4096
"""What so small a body unfolds into is not counted."""


class BodyMemory:
    """What the bodies of all requests in flight hold, in bytes, and may hold."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.share = max(max_bytes // SHARE, max_body_bytes)
        self.held = 0


class Holder:
    """Whose bodies are counted together: an attempt."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class Held:
    """What the body of one request holds, from its first byte until the request has been served."""

    __slots__ = ("_holder", "_memory", "size")

    def __init__(self, memory: BodyMemory, holder: Holder) -> None:
        self._memory = memory
        self._holder = holder
        self.size = 0

    def check(self, size: int) -> None:
        """Refusal 503 when `size` bytes more are not to be had, 429 when the attempt holds its share, 413 when this
        body alone would be more."""
        memory = self._memory
        if self.size + size > memory.share:
            raise Refusal(413, "body_too_large", "the body would take more memory than an attempt is given")
        if self._holder.held + size > memory.share:
            raise Refusal(
                429,
                "bodies_limit",
                "the attempt's requests in flight hold the memory that an attempt is given",
                kind="limit_exceeded",
                retry=True,
                headers=LATER,
            )
        if memory.held + size > memory.max_bytes:
            raise upstream_failed("the gateway has no memory left for requests", "gateway_busy", 503, LATER)

    def take(self, size: int) -> None:
        """Counts `size` bytes more; Refusal as `check`."""
        self.check(size)
        self.size += size
        self._holder.held += size
        self._memory.held += size

    def release(self) -> None:
        self._holder.held -= self.size
        self._memory.held -= self.size
        self.size = 0


LATER: Final = {"Retry-After": "1"}


_MARKS: Final = ((ord(","), 64), (ord("["), 72), (ord("{"), 120))
"""Bytes of an element, a list and an object, as they were measured of what takes most."""
_ENTRY: Final = 110
"""Bytes of an object's key and of its place in the object, beyond those of its value."""
_QUOTE: Final = ord('"')
_BACKSLASH: Final = ord("\\")
_EXACT_FROM_BYTES: Final = 64 << 10


def unfolding(raw: bytes) -> int:
    """Bytes, roughly and rather too many, that a JSON text takes as Python objects beyond its own length; 0 for a small
    one. Characters beyond ASCII are `widening`'s."""
    if len(raw) <= SMALL_BYTES:
        return 0
    text = np.frombuffer(raw, np.uint8)  # bytes.count takes nine times as long
    size = len(raw)
    for mark, cost in _MARKS:
        size += cost * int(np.count_nonzero(text == mark))
    # A colon after a quote or a blank: those of times, addresses and code are none of an object.
    return size + _ENTRY * int(np.count_nonzero((text[1:] == ord(":")) & (text[:-1] <= _QUOTE)))


def widening(written: bytes) -> int:
    """Bytes that the texts of a JSON take in memory beyond their length in UTF-8, where it is written without escapes:
    Python gives all characters of a text the width of its widest, and keeps its UTF-8 beside it once it was written.
    0 for a small one."""
    if len(written) <= SMALL_BYTES:
        return 0
    text = np.frombuffer(written, np.uint8)
    wider = _wider(int(text.max()))
    if not wider or len(written) < _EXACT_FROM_BYTES:
        return len(written) * wider
    # Text by text: words do not widen an image in Base64 beside them. A quote after a backslash may be part of a text.
    quotes = np.flatnonzero((text[1:] == _QUOTE) & (text[:-1] != _BACKSLASH)) + 1
    starts = np.concatenate(([0], quotes))
    sizes = np.diff(starts, append=len(written))
    by_widest = np.bincount(np.maximum.reduceat(text, starts), weights=sizes)
    return sum(int(size) * _wider(byte) for byte, size in enumerate(by_widest))


def _wider(byte: int) -> int:
    """Bytes beyond one that a byte of UTF-8 takes in a text whose greatest is `byte`."""
    if byte < 0x80:
        return 0
    if byte < 0xC4:  # Latin-1
        return 1
    return 2 if byte < 0xF0 else 4


async def read(request: web.BaseRequest, limit: int, held: Held | None = None) -> bytes:
    """The body as it was sent; Refusal 413 as soon as it is longer than `limit`, others as `Held.take`. Counted as it
    comes, not as it is announced: announcing costs an agent nothing."""
    content = request.content
    if content.is_eof():
        body = content.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        if held is not None:
            held.take(len(body))
        return body
    announced = request.content_length or 0
    if announced > limit:
        raise _too_large(limit)
    if held is not None:
        held.check(announced)
    parts = bytearray()
    while piece := await content.readany():
        if held is not None:
            held.take(len(piece))
        parts += piece
        if len(parts) > limit:
            raise _too_large(limit)
    return bytes(parts)


def decompress(raw: bytes, encoding: str | None, limit: int) -> bytes:
    """The body without its encoding; Refusal 413 when it is longer than `limit`, 400 or 415 when it cannot be read."""
    if encoding is None or encoding in ("", "identity"):
        data = raw
    elif encoding == "gzip":
        stream = zlib.decompressobj(wbits=31)
        try:
            data = stream.decompress(raw, max(limit, 0) + 1)
        except zlib.error as error:
            raise Refusal(400, "invalid_gzip", f"the body is not gzip: {error}") from None
        if not stream.eof and len(data) <= limit:
            raise Refusal(400, "invalid_gzip", "the gzip body is cut off")
    else:
        raise Refusal(415, "unsupported_encoding", "bodies may be plain or gzip")
    if len(data) > limit:
        raise _too_large(limit)
    return data


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body_too_large", f"the body is longer than the {max(limit, 0)} bytes that are allowed")
