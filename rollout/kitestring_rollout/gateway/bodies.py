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


_COSTS: Final = ((ord(","), 40), (ord("["), 64), (ord("{"), 200))
"""Bytes of an element, a list and an object."""
LATER: Final = {"Retry-After": "1"}


def unfolding(raw: bytes) -> int:
    """Bytes, roughly and rather too many, that a JSON text takes as Python objects beyond its own length."""
    if len(raw) <= SMALL_BYTES:
        return 0
    text = np.frombuffer(raw, np.uint8)  # bytes.count takes nine times as long
    size = len(raw)
    for mark, cost in _COSTS:
        size += cost * int(np.count_nonzero(text == mark))
    return size


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
