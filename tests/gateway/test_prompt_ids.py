"""Prompt ids cut out of a reply's bytes are the ids that the JSON holds, turn after turn."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.gateway.prompt_ids import WORTHWHILE_BYTES, PromptReader, read_ids

FILLER = "x" * WORTHWHILE_BYTES
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)


def reply(ids: Any, **more: Any) -> bytes:
    return orjson.dumps({"id": "a", "choices": [{"text": FILLER, **more}], "prompt_token_ids": ids})


@given(IDS, st.lists(st.tuples(st.booleans(), IDS), max_size=6))
def test_the_prompts_of_a_conversation_are_read_exactly(first: list[int], turns: list[tuple[bool, list[int]]]) -> None:
    reader = PromptReader()
    prompt = first
    for extends, more in [(True, []), *turns]:
        prompt = prompt + more if extends else more
        rest, ids = reader.cut(reply(prompt))
        assert ids is not None and ids.tolist() == prompt
        assert orjson.loads(rest) == {**orjson.loads(reply([]))}


def test_a_prompt_that_goes_on_within_a_number_is_no_extension() -> None:
    reader = PromptReader()
    for prompt in ([1, 2], [1, 23], [1, 2, 3], [1, 2], [12, 3]):
        _, ids = reader.cut(reply(prompt))
        assert ids is not None and ids.tolist() == prompt


def test_every_list_is_emptied_and_the_first_is_read() -> None:
    raw = orjson.dumps({"choices": [{"prompt_token_ids": [1, 2], "text": FILLER}, {"prompt_token_ids": [1, 2]}]})
    rest, ids = PromptReader().cut(raw)
    assert ids is not None and ids.tolist() == [1, 2]
    assert [choice["prompt_token_ids"] for choice in orjson.loads(rest)["choices"]] == [[], []]


def test_the_name_in_a_text_is_no_list() -> None:
    raw = orjson.dumps({"text": '"prompt_token_ids":[7,8]' + FILLER, "prompt_token_ids": [1, 2]})
    _, ids = PromptReader().cut(raw)
    assert ids is not None and ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "raw",
    [
        reply(None),
        reply([]),
        reply([1.5]),
        reply(["1"]),
        reply([[1]]),
        reply([-1]),
        reply([2**31]),
        b'{"prompt_token_ids":[1,2' + b" " * WORTHWHILE_BYTES,
        b'{"prompt_token_ids":[1]}',
    ],
)
def test_anything_else_is_left_to_the_parser(raw: bytes) -> None:
    assert PromptReader().cut(raw) == (raw, None)


@pytest.mark.parametrize("text", [b"", b",", b"1,", b",1", b"1,,2", b"1 2", b"1;2", b"99999999999"])
def test_what_is_no_list_of_ids(text: bytes) -> None:
    assert read_ids(text) is None
