"""Names and sampling that an agent asks for, and what reaches the policy server in training."""

from __future__ import annotations

import json

import pytest

from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.reader import read_attempts
from tests.thread.stack import GROUP_SIZE, Thread

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def test_every_call_is_sampled_as_training_assumes(thread: Thread) -> None:
    for exchange in thread.recorder.exchanges:
        request = exchange.request
        assert (request["temperature"], request["top_p"], request["top_k"]) == (1, 1, -1), request
        assert not {"presence_penalty", "min_p", "logit_bias"} & request.keys()
        assert request["model"] == "policy"


def test_other_sampling_is_flagged(thread: Thread) -> None:
    attempts = [seen["attempt"] for seen in thread.of("samples")]
    for attempt in read_attempts(thread.run.store(), attempts):
        assert isinstance(attempt, ProvenAttempt)
        assert [sorted(call.nonconforming) for call in attempt.calls()] == [
            ["temperature"],
            ["top_p"],
            ["presence_penalty", "temperature", "top_k"],
            [],
        ]
        assert all((call.sampling["temperature"], call.sampling["top_p"]) == (1, 1) for call in attempt.calls())
        assert attempt.end.calls.nonconforming == 3
    assert thread.metrics["kitestring_gateway_nonconforming_total",] == 3 * GROUP_SIZE


def test_other_sampling_is_refused_where_the_run_says_so(thread: Thread) -> None:
    answers = thread.refusing
    for name, field in (("greedy", "temperature"), ("cut", "top_p")):
        assert (answers[name].status, answers[name].code) == (400, "nonconforming_sampling")
        assert json.loads(answers[name].body)["error"]["param"] == field
    assert answers["as the run"].status == 200
    counts = json.loads(answers["fence"].body)["calls"]
    assert (counts["admitted"], counts["ok"], counts["nonconforming"]) == (1, 1, 0)
    assert answers["end"].status == 200
    labels = [exchange.label for exchange in thread.recorder.exchanges]
    assert labels.count("outside") == 1
    assert not any(row["rollout"] == "outside" for row in thread.rows), "an attempt of no plan was exported"


def test_an_alias_is_the_policy(thread: Thread) -> None:
    for seen in thread.of("choices"):
        (call,) = [call for call in seen["calls"] if call["model"] == "gpt-4o-mini"]
        assert json.loads(call["received"][0])["model"] == "gpt-4o-mini"
        last = max((row for row in thread.rows if row["attempt"] == seen["attempt"]), key=lambda row: row["seq"])
        assert (last["policy"], last["seq"], last["excluded"]) == ("policy", 7, None)
    for attempt in read_attempts(thread.run.store(), [seen["attempt"] for seen in thread.of("choices")]):
        assert isinstance(attempt, ProvenAttempt)
        assert (attempt.calls()[-1].requested_model, attempt.calls()[-1].model) == ("gpt-4o-mini", "policy")
