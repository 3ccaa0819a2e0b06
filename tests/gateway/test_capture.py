"""What is recorded of replies that are not as they should be, and what an agent sees of a reply."""

from __future__ import annotations

from typing import Any

import pytest

from kitestring_rollout.gateway.capture import Capture, MalformedReply
from kitestring_rollout.gateway.request import Asked
from kitestring_rollout.gateway.strip import strip_chunk, strip_whole
from kitestring_rollout.traces.records import ChoiceRecord
from tests.gateway.policy import Plan, chunks, whole

NOTHING = Asked(logprobs=False, token_ids=False, weight_versions=False, usage=False)
FLAGS = {"model": "policy", "logprobs": True, "return_token_ids": True, "return_weight_versions": True}


def choice(plan: Plan | None = None, *, version: str | None = None, **changes: Any) -> ChoiceRecord:
    reply = whole(FLAGS, plan or Plan(), chat=True)
    reply["choices"][0].update(changes)
    capture = Capture("chat")
    capture.whole(reply)
    return capture.result(trained=True, version=version).choices[0]


def logprobs(*values: Any) -> dict[str, Any]:
    return {"content": [{"logprob": value} for value in values]}


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": None},
        {"logprobs": logprobs(-0.5, -0.25, -1.0)},
        {"logprobs": logprobs(-0.5, -0.25, -1.0, -9999.0)},
        {"logprobs": logprobs(-0.5, -0.25, -1.0, None)},
        {"logprobs": logprobs(-0.5, -0.25, -1.0, "x")},
    ],
)
def test_a_missing_logprob_leaves_none(changes: dict[str, Any]) -> None:
    record = choice(**changes)
    assert len(record.logprobs) == 0 and record.token_ids.tolist() == [11, 12, 13, 2]


@pytest.mark.parametrize("ids", [None, [], "11", [11, "12"], [11, 2**40]])
def test_without_ids_there_are_no_logprobs_and_no_versions(ids: Any) -> None:
    record = choice(token_ids=ids)
    assert len(record.token_ids) == len(record.logprobs) == len(record.versions) == 0


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("1.0", 0, 4)], [("1.0", 0, 4)]),
        ([("1.0", 0, 3), ("1.1", 3, 4)], [("1.0", 0, 3), ("1.1", 3, 4)]),
        ([("1.0", 0, 0), ("1.1", 0, 4)], [("1.1", 0, 4)]),
        ([("1.0", 0, 3)], []),
        ([("1.0", 1, 4)], []),
        ([("1.0", 0, 5)], []),
        ([("1.0", 0, 2), ("1.1", 3, 4)], []),
        ([(None, 0, 4)], []),
    ],
)
def test_versions_cover_every_token_or_are_unknown(spans: list[Any], expected: list[Any]) -> None:
    given = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    record = choice(weight_versions=given, version="9.9")
    assert [(span.version, span.start, span.end) for span in record.versions] == expected


def test_the_header_speaks_where_the_reply_does_not() -> None:
    assert [(s.version, s.start, s.end) for s in choice(Plan(versions=False), version="2.1").versions] == [
        ("2.1", 0, 4)
    ]
    assert choice(Plan(versions=False)).versions == ()


@pytest.mark.parametrize(
    "reply", [{}, {"choices": "x"}, {"choices": ["x"]}, {"choices": [{"index": "0"}]}, {"choices": [{"message": "x"}]}]
)
def test_replies_of_another_shape_are_malformed(reply: dict[str, Any]) -> None:
    with pytest.raises(MalformedReply):
        Capture("chat").whole(reply)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_gives_what_the_whole_reply_gives(chat: bool, n: int) -> None:
    plan = Plan(n=n)
    body = {**FLAGS, "logprobs": True if chat else 0, "stream_options": {"include_usage": True}}
    one, other = Capture("chat" if chat else "completions"), Capture("chat" if chat else "completions")
    one.whole(whole(body, plan, chat))
    for chunk in chunks(body, plan, chat):
        other.chunk(chunk)
    a, b = one.result(trained=True, version=None), other.result(trained=True, version=None)
    assert a.prompt_token_ids.tolist() == b.prompt_token_ids.tolist()
    assert one.tokens() == other.tokens() == (4, 4 * n) and a.response_id == b.response_id == "cmpl-1"
    assert len(a.choices) == len(b.choices) == n
    for left, right in zip(a.choices, b.choices, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist() and left.logprobs.tolist() == right.logprobs.tolist()
        assert (left.versions, left.finish_reason, left.text) == (right.versions, right.finish_reason, right.text)


@pytest.mark.parametrize("nothing", [{"content": [], "token_logprobs": []}, {"content": None}, {}, None])
@pytest.mark.parametrize("chat", [True, False])
def test_a_last_chunk_without_a_token_adds_nothing(chat: bool, nothing: dict[str, Any] | None) -> None:
    """A server whose last token was out before it was known to be the last says so in such a chunk."""
    capture = Capture("chat" if chat else "completions")
    *tokens, last = chunks({**FLAGS, "logprobs": True if chat else 0}, Plan(), chat)
    end = last["choices"][0]
    text = {"delta": {"content": "!"}} if chat else {"text": "!"}
    begun = {**last, "choices": [{**end, "finish_reason": None, "weight_versions": None}]}
    over = {**last, "choices": [{**end, **text, "logprobs": nothing, "token_ids": []}]}
    for chunk in (*tokens, begun, over):
        capture.chunk(chunk)
    record = capture.result(trained=True, version=None).choices[0]
    assert record.token_ids.tolist() == [11, 12, 13, 2] and len(record.logprobs) == 4
    assert record.finish_reason == end["finish_reason"] and record.versions


def test_tool_calls_are_put_together_from_their_pieces() -> None:
    capture = Capture("chat")
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "sub", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]
    for delta in deltas:
        capture.chunk({"choices": [{"index": 0, "delta": delta}]})
    record = capture.result(trained=True, version=None).choices[0]
    assert record.message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
        ],
    }
    assert record.tool_calls == 2


def test_an_agent_sees_what_it_asked_for_and_no_more() -> None:
    reply = whole(FLAGS, Plan(), chat=True)
    strip_whole(reply, NOTHING, "alias")
    assert reply["model"] == "alias" and "prompt_token_ids" not in reply and "prompt_logprobs" not in reply
    assert reply["choices"][0].keys() == {"index", "finish_reason", "stop_reason", "message", "logprobs"}
    assert reply["choices"][0]["logprobs"] is None
    reply = whole(FLAGS, Plan(), chat=True)
    strip_whole(reply, Asked(logprobs=True, token_ids=True, weight_versions=True, usage=True), "alias")
    assert (
        reply["prompt_token_ids"] == [1, 2, 3, 4]
        and reply["choices"][0]["token_ids"]
        and reply["choices"][0]["weight_versions"]
    )
    assert reply["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("choices", "more", "asked", "seen"),
    [
        ([{"delta": {}, "token_ids": [1], "finish_reason": None}], {}, NOTHING, False),
        ([{"delta": {"content": ""}, "token_ids": [1]}], {}, NOTHING, False),
        ([{"delta": {"content": None, "tool_calls": []}, "token_ids": [1]}], {}, NOTHING, False),
        ([{"text": "", "token_ids": [1]}], {}, NOTHING, False),
        ([{"delta": {"role": "assistant", "content": ""}}], {}, NOTHING, True),
        ([{"delta": {"content": "x"}}], {}, NOTHING, True),
        ([{"delta": {}, "finish_reason": "stop"}], {}, NOTHING, True),
        ([{"delta": {}}, {"delta": {"content": "x"}}], {}, NOTHING, True),
        ([{"text": "x"}], {}, NOTHING, True),
        ([], {"usage": {"prompt_tokens": 1}}, NOTHING, False),
        ([], {"usage": {"prompt_tokens": 1}}, Asked(False, False, False, True), True),
        ([{"delta": {}, "token_ids": [1]}], {}, Asked(False, True, False, False), True),
    ],
)
def test_chunks_that_hold_only_ids_are_dropped(
    choices: list[Any], more: dict[str, Any], asked: Asked, seen: bool
) -> None:
    chunk = {"model": "policy", "choices": choices, **more}
    assert strip_chunk(chunk, asked, "policy") is seen
    assert ("usage" in chunk) is (asked.usage and "usage" in more)
