"""Chat messages: OpenAI's shape ⇄ the GenAI semantic conventions' shape (v1.41.1), without loss.

`from_semconv(to_semconv(m)) == m` for every JSON object with string keys. The conventions allow further keys in a
message and further part types, so what has no counterpart is carried along under its own name.
"""

from __future__ import annotations

from typing import Any

from kitestring_rollout.traces.records import Json

_RAW = "kitestring.raw"
"""Holds a message whose shape is not that of a chat message."""
_CONTENT = "kitestring.content"
"""How `content` was written where the parts do not tell: "null", "absent", "list"."""


def to_semconv(message: Json) -> Json:
    """One message as the conventions' `{role, parts, …}`."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not _convertible(message, content, calls):
        return {"role": role if isinstance(role, str) else "unknown", "parts": [], _RAW: message}
    taken = ("role", "content") if calls is None else ("role", "content", "tool_calls")
    rest = {key: value for key, value in message.items() if key not in taken}
    parts: list[Json] = []
    if isinstance(content, str):
        if role == "tool":
            parts.append({"type": "tool_call_response", "id": rest.pop("tool_call_id", None), "response": content})
        else:
            parts.append({"type": "text", "content": content})
    elif content is None:
        rest[_CONTENT] = "null" if "content" in message else "absent"
    else:
        rest[_CONTENT] = "list"
        parts.extend(_part(part) for part in content)
    if calls is not None:
        parts.extend(
            {
                "type": "tool_call",
                "id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        )
    return {"role": role, "parts": parts, **rest}


def from_semconv(message: Json) -> Json:
    """The inverse of `to_semconv`."""
    if _RAW in message:
        raw: Json = message[_RAW]
        return raw
    rest = {key: value for key, value in message.items() if key not in ("role", "parts", _CONTENT)}
    how = message.get(_CONTENT, "text")
    result: Json = {"role": message["role"]}
    parts: list[Json] = message["parts"]
    calls = [part for part in parts if part["type"] == "tool_call"]
    others = [part for part in parts if part["type"] != "tool_call"]
    if how == "null":
        result["content"] = None
    elif how == "list":
        result["content"] = [_unpart(part) for part in others]
    elif how == "text":
        part = others[0]
        if part["type"] == "tool_call_response":
            result["content"] = part["response"]
            if part["id"] is not None:
                result["tool_call_id"] = part["id"]
        else:
            result["content"] = part["content"]
    if calls:
        result["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    result.update(rest)
    return result


def _convertible(message: Json, content: Any, calls: Any) -> bool:
    if not message.keys().isdisjoint((_RAW, _CONTENT, "parts", "finish_reason", "kitestring.text")):
        return False
    if message.get("role") == "tool" and "tool_call_id" in message and not isinstance(message["tool_call_id"], str):
        return False
    if isinstance(content, list):
        if not all(isinstance(part, dict) and _plain_part(part) for part in content):
            return False
    elif content is not None and not isinstance(content, str):
        return False
    if calls is None:
        return True
    return isinstance(calls, list) and bool(calls) and all(_plain_call(call) for call in calls)


def _plain_part(part: Json) -> bool:
    kind = part.get("type")
    if kind == "text":
        return part.keys() == {"type", "text"}
    return isinstance(kind, str) and kind not in ("tool_call", "tool_call_response")


def _plain_call(call: Any) -> bool:
    if not isinstance(call, dict) or call.keys() != {"id", "type", "function"} or call["type"] != "function":
        return False
    function = call["function"]
    return isinstance(function, dict) and function.keys() == {"name", "arguments"}


def _part(part: Json) -> Json:
    return {"type": "text", "content": part["text"]} if part["type"] == "text" else part


def _unpart(part: Json) -> Json:
    return {"type": "text", "text": part["content"]} if part["type"] == "text" else part
