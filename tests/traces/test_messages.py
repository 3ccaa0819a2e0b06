"""Messages in the conventions' shape, and back."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings

from kitestring_rollout.traces.messages import from_semconv, to_semconv
from tests.traces.rollouts import messages


@settings(max_examples=200, deadline=None)
@given(messages)
def test_no_message_is_changed_on_the_way(message: dict[str, Any]) -> None:
    written = orjson.dumps(to_semconv(message))
    assert from_semconv(orjson.loads(written)) == message


@pytest.mark.parametrize(
    ("message", "written"),
    [
        (
            {"role": "user", "content": "2+2"},
            {"role": "user", "parts": [{"type": "text", "content": "2+2"}]},
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2}'}}],
            },
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "c1", "name": "sum", "arguments": '{"a": 2}'}],
                "kitestring.content": "null",
            },
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "4"}]},
        ),
        (
            {
                "role": "user",
                "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            {
                "role": "user",
                "parts": [{"type": "text", "content": "see"}, {"type": "image_url", "image_url": {"url": "u"}}],
                "kitestring.content": "list",
            },
        ),
    ],
)
def test_ordinary_messages_are_written_as_the_conventions_say(message: dict[str, Any], written: dict[str, Any]) -> None:
    assert to_semconv(message) == written
