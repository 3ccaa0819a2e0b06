"""A frozen judge beside the policy: reached by name, paid from its own budget, known to no agent, never trained."""

from __future__ import annotations

import pytest

from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.reader import read_attempts
from tests.thread.recorder import JUDGE_TOKENS
from tests.thread.stack import GROUP_SIZE, JUDGE_KEY, JUDGE_LIMIT, Thread

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

ADMITTED = -(-JUDGE_LIMIT // JUDGE_TOKENS)
"""Calls until the limit is reached: the one that reaches it is still answered."""


def test_it_is_called_as_asked_with_its_own_key(thread: Thread) -> None:
    assert len(thread.recorder.judged) == ADMITTED * GROUP_SIZE
    tokens = {seen["environment"]["OPENAI_API_KEY"] for seen in thread.evidence}
    for headers, body in thread.recorder.judged:
        assert headers["Authorization"] == f"Bearer {JUDGE_KEY}"
        assert not any(token in value for value in headers.values() for token in tokens)
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-large", 0, 5)
        assert not {"logprobs", "return_token_ids", "return_weight_versions", "top_p"} & body.keys()


def test_its_tokens_are_limited(thread: Thread) -> None:
    for seen in thread.of("judge"):
        answered = [call["model"] for call in seen["calls"] if call["model"] != "policy"]
        assert answered == ["judge", "gpt-judge", "judge"]
        assert [(r["what"], r["status"], r["code"]) for r in seen["refusals"]] == [
            ("judge", 429, "frozen_tokens_limit"),
            ("gpt-judge", 429, "frozen_tokens_limit"),
        ]
        assert all(refusal["headers"]["x-should-retry"] == "false" for refusal in seen["refusals"])
        assert seen["calls"][-1]["model"] == "policy", "the limit of the judge is no limit of the policy"


def test_agents_never_see_its_key(thread: Thread) -> None:
    """Also not where the judge says it back in a header."""
    written = [path for path in thread.folder.root.rglob("*") if path.is_file() and not path.is_symlink()]
    holders = [path for path in written if JUDGE_KEY.encode() in path.read_bytes()]
    assert holders == [thread.folder.secrets / "model-judge"]
    for seen in thread.of("judge"):
        assert JUDGE_KEY not in str(seen)
        assert not any("x-echo" in {name.lower() for name in call["headers"]} for call in seen["calls"])


def test_it_is_recorded_and_never_trained(thread: Thread) -> None:
    attempts = [seen["attempt"] for seen in thread.of("judge")]
    assert {row["policy"] for row in thread.rows} == {"policy"}
    for attempt in read_attempts(thread.run.store(), attempts):
        assert isinstance(attempt, ProvenAttempt)
        calls = attempt.calls()
        assert [call.model for call in calls] == ["policy", "judge", "judge", "judge", "policy"]
        for call in calls[1:4]:
            assert not call.trained and call.outcome == "ok"
            assert (call.prompt_tokens or 0) + (call.completion_tokens or 0) == JUDGE_TOKENS
            assert not len(call.prompt_token_ids) and not len(call.choices[0].token_ids)
        assert [row["seq"] for row in thread.rows if row["attempt"] == attempt.attempt] == [1, 5]
