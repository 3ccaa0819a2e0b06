"""kitestring show: a rollout as a reader sees it."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Command
from tests.cli.run_folders import MadeUpRun, Try, half_right
from tests.cli.test_inspect import learn

ROLLOUT = "t000001-00000000-001"

EXPECTED = """\
t000001-00000000-001  train, step 1, task 4, group t000001-00000000
Succeeded  reward 0 (builtin)
attempt 1  ID1  AgentFailed, 2 calls: exit code 1: boom  (--attempt 1)
attempt 2  ID2  no end record, 2 calls: no end record  (--attempt 2)
attempt 3  ID3  Succeeded, 2 calls, counts

attempt ID3

call 1  policy, version 1.0  ok  12 → 5 tokens, 0.25 s  temperature 1.0, max_tokens 40
  tools: calculator
  system     Use the calculator.
  user       What is 2+2?
  assistant  → calculator({"x": "2+2"})
             finish tool_calls, 1 tool call, row 0, credit 0, advantage -0.707

call 2  policy, version 1.0  ok  19 → 5 tokens, 0.25 s  temperature 1.0, max_tokens 40
  tool       4
  assistant  Answer: 4
             finish stop, row 0, credit 0, advantage -0.707

  output     Answer: 4
Succeeded  reward 0 (builtin), 0.50 s
"""


def expected(made: MadeUpRun) -> str:
    """The text with the ids of the attempts."""
    text = EXPECTED
    for place, attempt in enumerate(made.attempts[ROLLOUT], start=1):
        text = text.replace(f"ID{place}", attempt)
    return text


def test_a_rollout_call_by_call(kitestring: Command, made: MadeUpRun) -> None:
    learn(made)
    said = kitestring("show", "calc", ROLLOUT)
    assert said.code == 0, said.err
    assert said.out == expected(made)


def test_another_attempt_with_ids(kitestring: Command, made: MadeUpRun) -> None:
    learn(made)
    attempt = made.attempts[ROLLOUT][1]
    by_place = kitestring("show", "calc", ROLLOUT, "--attempt", "2", "--ids")
    by_id = kitestring("show", "calc", ROLLOUT, "--attempt", attempt[-12:], "--ids")
    assert by_place == by_id
    prompt, response, logprobs = made.ids[attempt, 2]
    words = " ".join(by_place.out.split())
    assert f"prompt ids {' '.join(map(str, prompt))} assistant Answer: 4" in words
    assert f"reply ids {' '.join(map(str, response))} logprobs" in words
    assert " ".join(f"{value:.4f}" for value in logprobs) in words
    assert "lost, never trained on: no end record" in by_place.out


def test_a_rollout_for_programs(kitestring: Command, made: MadeUpRun) -> None:
    learn(made)
    said = kitestring("show", "calc", ROLLOUT, "--output", "json", "--ids")
    found = json.loads(said.out)
    assert (found["task"], found["class"], found["reward"], found["excluded"]) == (4, "Succeeded", 0.0, None)
    assert [attempt["class"] for attempt in found["attempts"]] == ["AgentFailed", None, "Succeeded"]
    assert [attempt["counts"] for attempt in found["attempts"]] == [False, False, True]
    assert found["attempts"][1]["lost"] == "no end record"
    for attempt in found["attempts"]:
        for call in attempt["calls"]:
            prompt, response, logprobs = made.ids[attempt["attempt"], call["seq"]]
            assert call["prompt_token_ids"] == prompt
            assert call["choices"][0]["token_ids"] == response
            assert call["choices"][0]["logprobs"] == logprobs
    first, second = found["attempts"][2]["calls"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert (second["goes_on_from"], [message["role"] for message in second["messages"]]) == (1, ["tool"])
    assert second["choices"][0]["row"] == 0
    assert "token_ids" not in kitestring("show", "calc", ROLLOUT, "--output", "json").out


def test_a_rollout_of_a_step_that_was_not_committed(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1, commit=False)
    said = kitestring("show", "calc", "t000001-00000001-000")
    assert said.code == 0
    assert said.out.splitlines()[0] == "t000001-00000001-000  train, step 1  not committed"
    assert "assistant  Answer: 4" in said.out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("t000001-00000000", "2 rollouts match; give more of the id: t000001-00000000-000, t000001-00000000-001"),
        ("t000001-00000000-007", "no such rollout in run calc-20261129-120000; nearest: t000001-00000000-00"),
        ("nonsense", "no such rollout in run calc-20261129-120000; nearest: "),
    ],
)
def test_a_rollout_that_is_not_clear(kitestring: Command, made: MadeUpRun, text: str, error: str) -> None:
    made.step(1)
    said = kitestring("show", "calc", text)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {text}: {error}")


def test_a_part_of_an_id_suffices(kitestring: Command, made: MadeUpRun) -> None:
    made.validation(0, "validation-sampled")
    made.step(1)
    assert kitestring("show", "calc", "s000000-00000002").out.startswith("s000000-00000002-000  validation-sampled")
    assert kitestring("show", "calc", "01-001").out.startswith("t000001-00000001-001  train")


def test_an_attempt_that_is_not_there(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1)
    said = kitestring("show", "calc", "t000001-00000000-000", "--attempt", "2")
    assert said.code == 2
    assert said.err.startswith("error: --attempt 2: no such attempt; known: 1 = 0199")


def test_a_run_without_traces(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1)
    (made.folder.store / "traces").rename(made.folder.root / "away")
    said = kitestring("show", "calc", "t000001-00000000-000")
    assert said.code == 2
    assert "the run has no traces below traces/" in said.err


def test_damaged_traces_are_said(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1)
    for place in (made.folder.store / "traces").rglob("*.binpb"):
        place.write_bytes(b"\xff" + place.read_bytes())
    said = kitestring("show", "calc", "t000001-00000000-000")
    assert said.code == 0
    assert "note: 2 trace objects cannot be read and were left out" in said.out
    assert "no attempt left a trace" in said.out
    assert said.err == ""


def test_what_an_agent_writes_cannot_move_the_cursor(kitestring: Command, made: MadeUpRun) -> None:
    hostile = {"role": "assistant", "content": "\x1b[2J\x1b]0;owned\x07[bold]markup[/bold]\u202e\r overwritten"}

    def play(plan: object, index: int) -> list[Try]:
        return [Try(replies=[hostile], question="[red]\x9b31m", output="\x1b[31m", reason="\x1b[H")]

    made.step(1, play)
    said = kitestring("show", "calc", "t000001-00000000-000")
    assert said.code == 0
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(said.out)
    assert "\\x1b[2J\\x1b]0;owned\\x07[bold]markup[/bold]\\x202e\\x0d overwritten" in said.out
    assert "[red]\\x9b31m" in said.out


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": {"not": "a list"}},
        {"role": "assistant", "tool_calls": [{"odd": 1}, "text", None]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": 3}}]},
        {"content": None},
        {"role": ["a", "list"], "content": 7},
    ],
)
def test_messages_of_any_shape(kitestring: Command, made: MadeUpRun, reply: dict[str, object]) -> None:
    made.step(1, lambda _plan, _index: [Try(replies=[reply, reply])])
    assert kitestring("show", "calc", "t000001-00000000-000").code == 0


def test_without_contents(kitestring: Command, made: MadeUpRun) -> None:
    made.record_contents = False
    made.step(1, half_right)
    said = kitestring("show", "calc", "t000001-00000000-000")
    assert "assistant  (contents were not recorded)" in said.out
