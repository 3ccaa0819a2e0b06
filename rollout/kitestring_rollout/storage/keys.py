"""Which keys a store accepts: relative paths that cannot leave their prefix, the same for every store."""

from __future__ import annotations

MAX_KEY_BYTES = 1024
MAX_SEGMENT_BYTES = 200
"""Leaves room below the usual 255 bytes of a file name."""


class KeyRefused(ValueError):
    """The key is not one that every store can hold inside its prefix."""


def check_key(key: str) -> str:
    """Give the key back, or raise `KeyRefused` saying why it is none."""
    problem = _problem(key)
    if problem is not None:
        raise KeyRefused(f"object key {key!r} is refused: {problem}")
    return key


def check_prefix(prefix: str) -> str:
    """A prefix of `list`: empty, or the beginning of a key (it may end in the middle of a segment or with `/`)."""
    if prefix:
        check_key(prefix[:-1] if prefix.endswith("/") else prefix)
    return prefix


def _problem(key: str) -> str | None:
    if not key:
        return "it is empty"
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if size > MAX_KEY_BYTES:
        return f"it is longer than {MAX_KEY_BYTES} bytes"
    if not key.isprintable() or "\\" in key:
        return "only printable characters without backslash are allowed"
    return next(filter(None, map(_problem_of_segment, key.split("/"))), None)


def _problem_of_segment(segment: str) -> str | None:
    if not segment:
        return "it has an empty segment (leading, trailing or doubled slash)"
    if segment.startswith("."):
        return "a segment begins with a dot"
    if len(segment.encode()) > MAX_SEGMENT_BYTES:
        return f"a segment is longer than {MAX_SEGMENT_BYTES} bytes"
    return None
