"""What one rollout says about an agent: rows, limits, what to mend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kitestring_api.v1alpha1 import TrainingRunSpec
from kitestring_cli.try_rollout.findings import rows_of, warnings
from kitestring_rollout.protocol.gateway_admin import CallCounts
from kitestring_rollout.traces.records import CallRecord, ChoiceRecord, VersionSpan
from tests.traces.rollouts import call, end

SPEC = TrainingRunSpec.model_validate(
    {
        "policies": [{"name": "policy", "model": {"path": "m"}}],
        "tasks": {"train": {"inline": [{"q": 1}]}},
        "rollouts": {"poolRef": {"name": "p"}},
        "algorithm": {"maxRowTokens": {"prompt": 20, "response": 20}},
        "steps": 1,
    },
    by_alias=True,
)


def one(seq: int, prompt: list[int], response: list[int], **changes: Any) -> CallRecord:
    choice = ChoiceRecord(
        0,
        np.array(response, np.int32),
        np.full(len(response), -0.5, np.float32),
        (VersionSpan("1.0", 0, len(response)),),
        "stop",
        {"role": "assistant", "content": "hm"},
    )
    return call(seq, **{"prompt_token_ids": np.array(prompt, np.int32), "choices": (choice,), **changes})


def test_contexts_that_extend_each_other_are_one_row() -> None:
    rows = rows_of([one(1, [1, 2], [3]), one(2, [1, 2, 3, 4], [5, 6]), one(3, [1, 2, 3, 4, 5, 6, 7], [8])], SPEC)
    assert rows.sentence == "3 replies → 1 row: your agent's contexts extend each other"
    assert (rows.calls, rows.rows, rows.prompt, rows.trained, rows.masked) == (3, 1, 2, 4, 2)


@pytest.mark.parametrize(
    ("second", "where"),
    [
        ([9, 2, 3], "call 2 departs from call 1 at token 0 of 3, in its prompt"),
        ([1, 2, 9], "call 2 departs from call 1 at token 2 of 3, in its reply"),
        ([1, 2], "call 2 departs from call 1 at token 2 of 3, in its reply"),
    ],
)
def test_contexts_that_do_not(second: list[int], where: str) -> None:
    rows = rows_of([one(1, [1, 2], [3]), one(2, second, [5])], SPEC)
    assert rows.sentence == f"2 replies → 2 rows: your agent's contexts do not extend each other; {where}"


def test_two_conversations() -> None:
    rows = rows_of([one(1, [1], [2]), one(2, [7], [8]), one(3, [1, 2, 3], [4])], SPEC)
    assert rows.sentence == "3 replies → 2 rows: some of your agent's contexts extend each other"


def test_a_single_reply() -> None:
    assert rows_of([one(1, [1], [2])], SPEC).sentence == "1 reply → 1 row"


def test_a_version_is_not_asked_for() -> None:
    """Nothing was pushed to an endpoint of the user's own."""
    choice = ChoiceRecord(0, np.array([3], np.int32), np.array([-0.5], np.float32), (), "stop")
    rows = rows_of([call(1, choices=(choice,))], SPEC)
    assert (rows.rows, rows.excluded) == (1, ())


def test_what_is_not_trained_on_says_why() -> None:
    no_logprobs = ChoiceRecord(0, np.array([3], np.int32), finish_reason="stop", text="x")
    rows = rows_of([call(1, choices=(no_logprobs,)), one(2, list(range(30)), [1])], SPEC)
    assert rows.excluded == ("call 1: no log probabilities recorded",)
    assert rows.dropped == ("prompt of 30 tokens over maxRowTokens.prompt 20",)
    assert rows_of([call(1, choices=(no_logprobs,))], SPEC).sentence == (
        "1 reply, none of which can be trained on: no rows"
    )


def test_without_ids_the_messages_tell() -> None:
    def said(seq: int, *texts: str) -> CallRecord:
        messages = tuple({"role": "user", "content": text} for text in texts)
        return call(seq, trained=False, messages=messages)

    first = "calls to a model that reports no token ids: no rows; by its messages, "
    assert rows_of([], SPEC).sentence == "no call, so nothing to train on: the agent never called a model"
    assert rows_of([said(1, "a")], SPEC).sentence.endswith("no rows; a policy server would report them")
    assert rows_of([said(1, "a"), said(2, "a", "b")], SPEC).sentence == (
        f"2 {first}each call goes on from the one before, which gives one row"
    )
    assert rows_of([said(1, "a"), said(2, "b")], SPEC).sentence == (
        f"2 {first}call 2 begins anew, which gives more than one row"
    )
    assert rows_of([said(1, "a"), said(2, "a", "b"), said(3, "a", "c")], SPEC).sentence == (
        f"3 {first}its calls branch, which gives more than one row"
    )


def warned(*calls: CallRecord, rejected: int = 0) -> list[str]:
    counts = CallCounts(admitted=len(calls), ok=len(calls), rejected=rejected)
    record = replace(end(len(calls), []), calls=counts)
    return warnings(calls, record, SPEC, reports_ids=True, asked=("policy", "gpt-4o"))


def test_a_rollout_without_anything_to_mend() -> None:
    assert warned(call(1, sampling={"temperature": 1.0, "max_tokens": 5, "top_p": 1})) == []


def test_sampling_that_training_does_not_assume() -> None:
    assert warned(call(1, sampling={"temperature": 0.2, "presence_penalty": 0.5})) == [
        "call 1 asks for temperature 0.2: in training it is refused or corrected (training samples at the run's "
        "temperature)",
        "call 1 asks for presence_penalty 0.5: in training it is refused or corrected (logits are shifted by tokens "
        "seen before: not the policy's distribution)",
    ]


@pytest.mark.parametrize(
    "content",
    [
        '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>',
        'I will call {"name": "calculator", "arguments": {"x": 1}}',
        '[TOOL_CALLS] [{"name": "calculator"}]',
        "<function=calculator>",
    ],
)
def test_tool_calls_that_were_not_parsed(content: str) -> None:
    ids = np.array([3], np.int32)
    reply = ChoiceRecord(0, ids, np.array([-0.5], np.float32), message={"role": "assistant", "content": content})
    tools = ({"type": "function", "function": {"name": "calculator"}},)
    (warning,) = warned(call(1, choices=(reply,), tools=tools))
    assert warning.startswith("call 1: the reply reads like a tool call, and the server did not parse it: set spec.pol")
    assert warned(call(1, choices=(reply,))) == []  # it was offered none


def test_other_things_to_mend() -> None:
    cut = ChoiceRecord(0, np.array([3], np.int32), np.array([-0.5], np.float32), finish_reason="length")
    assert warned(call(1, choices=(cut,))) == ["call 1: the reply was cut at its token limit"]
    silent = ChoiceRecord(0, finish_reason="stop", text="x")
    assert warned(call(1, choices=(silent,))) == ["call 1: the server reports no token ids for it"]
    failed = call(1, outcome="failed", status=502, error="no server", choices=())
    assert warned(failed) == ["call 1 failed: no server"]
    assert warned(rejected=2) == [
        "2 requests were refused before they counted as calls: over a limit of the pool, not a request at all, or for "
        "a model of another name than policy, gpt-4o"
    ]
