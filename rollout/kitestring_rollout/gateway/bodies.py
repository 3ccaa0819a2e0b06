"""Bodies of agents' requests, bounded before and after decompression: small ones may unfold into gigabytes."""

from __future__ import annotations

import zlib

from aiohttp import web

from kitestring_rollout.gateway.errors import Refusal


async def read(request: web.BaseRequest, limit: int) -> bytes:
    """The body as it was sent; Refusal 413 as soon as it is longer than `limit`."""
    content = request.content
    if content.is_eof():
        body = content.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        return body
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    parts = bytearray()
    while piece := await content.readany():
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
