"""What a message says, as text for a reader: agents send messages of any shape, and none of them may break a view."""

from __future__ import annotations

from typing import Any

import orjson

from kitestring_cli.show.printable import one_line, printable
from kitestring_rollout.traces.records import Json


def message_text(message: Json) -> str:
    """Content and tool calls of a message in OpenAI's shape; printable, never empty."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [] if content is None or content == "" else [_content(content)]
    parts += [_tool_call(call) for call in calls] if isinstance(calls, list) else []
    return "\n".join(parts) or "(nothing)"


def tool_name(tool: Json) -> str:
    """Name of a tool definition."""
    function = tool.get("function")
    return str(function.get("name") if isinstance(function, dict) else tool.get("name", tool.get("type", "?")))


def _content(content: Any) -> str:
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return printable("\n".join(str(text) for text in texts))
    return printable(_json(content))


def _tool_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return f"→ {printable(_json(call))}"
    arguments = function.get("arguments")
    said = arguments if isinstance(arguments, str) else _json(arguments)
    return f"→ {one_line(str(function.get('name')), 80)}({printable(said)})"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
