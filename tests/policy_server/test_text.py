"""Text from tokens: characters, stop strings, tool calls, whole and in pieces."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_endpoint import Policies
from tokenizers import Tokenizer

from kitestring_trainer.policy_server.detokenize import TextStream
from kitestring_trainer.policy_server.errors import RequestRefused
from kitestring_trainer.policy_server.tokenizer import template_messages
from kitestring_trainer.policy_server.tool_calls import HermesStream, Reply, parse_hermes


@pytest.fixture(scope="module")
def tokenizer(policies: Policies) -> Tokenizer:
    return Tokenizer.from_file(str(policies.first / "tokenizer.json"))


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 401), max_size=40), skip=st.booleans())
def test_pieces_make_up_the_whole(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> None:
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    pieces = [stream.push(token)[0] for token in tokens]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_no_piece_ends_within_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer, skip_special_tokens=False)
    so_far = ""
    for token in tokenizer.encode(text).ids:
        so_far += stream.push(token)[0]
        assert text.startswith(so_far)
    assert so_far + stream.finish() == text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_where_a_search_token_by_token_does(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    tokens = tokenizer.encode(text).ids
    stream = TextStream(tokenizer, skip_special_tokens=False, stop=stop)
    given_out, seen, stopped_by = "", "", None
    for token in tokens:
        piece, stopped_by = stream.push(token)
        given_out += piece
        seen += tokenizer.decode([token])
        cuts = sorted((seen.find(one), one) for one in stop if one in seen)
        if cuts:
            assert (given_out, stopped_by) == (seen[: cuts[0][0]], cuts[0][1])
            return
        assert stopped_by is None
        # What is held back is no longer than the beginning of a stop string.
        assert seen.startswith(given_out)
        assert len(seen) - len(given_out) < max(len(one) for one in stop)
    assert given_out + stream.finish() == text


CALL = '<tool_call>{"name": "f", "arguments": {"x": "ä"}}</tool_call>'


def test_a_call_is_read() -> None:
    reply = parse_hermes("I see.\n" + CALL)
    assert reply.content == "I see.\n"
    (call,) = reply.tool_calls
    assert str(call["id"]).startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "f", "arguments": '{"x": "ä"}'}


@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "f", "arguments": {"x": "\ud800"}}',
        r'{"name": "f", "arguments": "\udfff"}',
        r'{"name": "\ud800", "arguments": {}}',
        '{"name": "f", "arguments": ' + "[" * 100_000,
        '{"name": "f", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"name": "f", "arguments": ' + "1" * 5000 + "}",
    ],
    ids=str.__len__,
)
def test_a_call_that_no_reply_could_hold_stays_text(call: str) -> None:
    text = f"I see. <tool_call>{call}</tool_call>"
    assert parse_hermes(text) == Reply(text)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet='{}[]":,\\\\ud8dc0 namerguts1', max_size=60).map(
        lambda text: f'<tool_call>{{"name": "f", "arguments": {text}'
    )
)
def test_any_text_of_a_model_becomes_a_reply_that_can_be_sent(text: str) -> None:
    reply = parse_hermes(text)
    orjson.dumps([reply.content, reply.tool_calls])


@pytest.mark.parametrize("arguments", [r'{"x": "\ud800"}', "[" * 100_000, '"', "5"])
def test_arguments_that_no_template_could_spell_are_empty(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = template_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_several_calls_have_ids_of_their_own() -> None:
    reply = parse_hermes(CALL + "\n" + CALL)
    assert reply.content is None
    assert len({call["id"] for call in reply.tool_calls}) == 2


def test_the_last_call_may_lack_its_end_tag() -> None:
    assert len(parse_hermes(CALL.removesuffix("</tool_call>")).tool_calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "",
        "<tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {</tool_call>',
        "<tool_call>[]</tool_call>",
        CALL + "<tool_call>broken</tool_call>",
    ],
)
def test_what_does_not_parse_stays_text(text: str) -> None:
    reply = parse_hermes(text)
    assert (reply.content, reply.tool_calls) == (text, ())


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["<", "tool_call", ">", "</", CALL, "text", "<tool_call>", "\n"]), max_size=8),
    data=st.data(),
)
def test_a_streamed_reply_is_the_whole_reply(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    stream = HermesStream()
    passed, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        passed += stream.push(rest[:size])
        rest = rest[size:]
    last = stream.finish()
    whole = parse_hermes(text)
    assert passed + (last.content or "") == (whole.content or "")
    assert [call["function"] for call in last.tool_calls] == [call["function"] for call in whole.tool_calls]


def test_messages_become_what_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    odd = [{"id": "2", "function": {"name": "f", "arguments": text}} for text in ("{broken", "[1]", None)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call, *odd]},
        {"role": "assistant", "content": "x", "tool_calls": []},
    ]
    user, calling, plain = template_messages(messages)
    assert user == {"role": "user", "content": "a\nb"}
    assert calling["content"] == ""
    assert [one["function"]["arguments"] for one in calling["tool_calls"]] == [{"x": 1}, {}, {}, {}]
    assert plain == {"role": "assistant", "content": "x"}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == json.dumps({"x": 1})  # type: ignore[index]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "at least one"),
        ({"role": "user"}, "list"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "image_url"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "function.name"),
    ],
)
def test_messages_that_cannot_be_taken(messages: object, word: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        template_messages(messages)
    assert word in refused.value.message
