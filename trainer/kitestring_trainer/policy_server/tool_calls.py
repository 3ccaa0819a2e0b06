"""Tool calls in the model's text, in the Hermes form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

START = "<tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


@dataclass(frozen=True)
class Reply:
    """What an assistant says: text, tool calls, or both."""

    content: str | None
    tool_calls: tuple[dict[str, object], ...] = ()
    """OpenAI's `{"id", "type": "function", "function": {"name", "arguments": JSON text}}`."""


def parse_hermes(text: str) -> Reply:
    """Split a finished reply. When one call does not parse, all of it stays ordinary text.

    The last call may lack its end tag. Text after a call is dropped.
    """
    if START not in text:
        return Reply(text)
    calls: list[dict[str, object]] = []
    for closed, rest in _CALL.findall(text):
        function = _function(closed or rest)
        if function is None:
            return Reply(text)
        calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return Reply(text[: text.index(START)] or None, tuple(calls))


def _function(text: str) -> dict[str, str] | None:
    """`{"name", "arguments": JSON text}` of a call, or None when it is none that a reply could hold."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return None
        name, arguments = call["name"], call["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        # JSON may escape half a surrogate pair, which is no character and has no place in a reply.
        (name + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return {"name": name, "arguments": arguments}


class HermesStream:
    """The same, while the text arrives: text is passed on until a call begins, calls come at the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns the text that certainly belongs to no tool call."""
        self._held += text
        at = self._held.find(START)
        if at < 0:
            at = len(self._held) - _overlap(self._held)
        passed, self._held = self._held[:at], self._held[at:]
        return passed

    def finish(self) -> Reply:
        """What is left at the end."""
        return parse_hermes(self._held)


def _overlap(text: str) -> int:
    """Length of the longest end of `text` that begins START."""
    return next((size for size in range(min(len(START) - 1, len(text)), 0, -1) if START.startswith(text[-size:])), 0)
