"""Text of agents and models on a terminal: what they wrote may be shown, what it would do to the terminal may not."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and those that turn the direction of writing."""


def printable(text: str) -> str:
    """`text` with control characters as visible escapes, so that no agent can move the cursor or clear the screen."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))


def one_line(text: str, longest: int) -> str:
    """`text` as a single printable line of at most `longest` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
