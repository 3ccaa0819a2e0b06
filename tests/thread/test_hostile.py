"""An agent that attacks its run: every try is refused and counted, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256

import pytest

from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.reader import read_attempts
from tests.thread.stack import GROUP_SIZE, Thread

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

EXPECTED = {
    "admin fence": {(401, "Unauthorized"): 2},
    "admin end": {(401, "Unauthorized"): 2},
    "admin status": {(401, "Unauthorized"): 2},
    "admin open": {(401, "Unauthorized"): 1},
    "admin drain": {(401, "Unauthorized"): 1},
    "admin hold": {(401, "Unauthorized"): 1},
    "queue lease": {(401, "Unauthorized"): 1},
    "queue finish": {(401, "Unauthorized"): 1},
    "queue status": {(401, "Unauthorized"): 1},
    "collector traces": {(401, None): 1},
    "collector agent traces": {(401, None): 1},
    "forged attempt": {(401, "invalid_token"): 1},
    "forged scope": {(401, "invalid_token"): 1},
    "forged mode": {(401, "invalid_token"): 1},
    "forged mac": {(401, "invalid_token"): 1},
    "forged nothing": {(401, "invalid_token"): 1},
    "no token": {(401, "invalid_token"): 1},
    "reward": {(403, "wrong_scope"): 3},
    "route": {(404, "unknown_route"): 6},
    "method": {(405, "method_not_allowed"): 1},
    "no json": {(400, "invalid_json"): 1},
    "no model": {(404, "model_not_found"): 1},
    "steering": {(400, "unsupported_parameter"): 1},
    "media": {(400, "remote_media_refused"): 1},
    "spans": {(400, "invalid_spans"): 1, (415, "unsupported_media_type"): 1},
    "gzip": {(400, "invalid_gzip"): 1},
}
OF_THE_ATTEMPT = 10
"""Refused calls, rewards and spans of an attacker that came with its own token and to a route that there is."""


def test_every_try_is_refused(thread: Thread) -> None:
    for seen in thread.of("attack"):
        found: dict[str, Counter[tuple[int, str | None]]] = {}
        for refusal in seen["refusals"]:
            found.setdefault(refusal["what"], Counter())[refusal["status"], refusal["code"]] += 1
        assert found == EXPECTED


def test_refusals_are_counted(thread: Thread) -> None:
    """The counters are what was refused, one for one."""
    refusals = [refusal for seen in thread.evidence for refusal in seen["refusals"]]
    ours = ("admin", "queue", "collector")
    seen = Counter(refusal["code"] for refusal in refusals if not refusal["what"].startswith(ours))
    seen.update(answer.code for answer in thread.late.values())
    seen["unauthorized"] = sum(refusal["what"].startswith("admin") for refusal in refusals)
    counted = {key[1]: value for key, value in thread.metrics.items() if key[0] == "kitestring_gateway_refused_total"}
    assert counted == seen
    for route in ("traces", "agent"):
        assert thread.collected["kitestring_collector_requests_total", route, "401"] == GROUP_SIZE


def test_tokens_are_worth_nothing_after_their_attempt(thread: Thread) -> None:
    found = {name: (answer.status, answer.code) for name, answer in thread.late.items()}
    assert found == {
        "chat": (410, "attempt_closed"),
        "models": (410, "attempt_closed"),
        "spans": (410, "attempt_closed"),
        "reward": (403, "wrong_scope"),
        "other process": (410, "epoch_gone"),
    }


def test_rewards_are_taken_once_and_only_as_numbers_where_the_agent_may_score(thread: Thread) -> None:
    found = {name: (answer.status, answer.code) for name, answer in thread.refusing.items() if answer.status != 200}
    assert found == {
        "greedy": (400, "nonconforming_sampling"),
        "cut": (400, "nonconforming_sampling"),
        "not a number": (422, "reward_unusable"),
        "boolean": (422, "reward_unusable"),
        "again": (409, "reward_duplicate"),
    }
    (reward,) = json.loads(thread.refusing["fence"].body)["rewards"]
    assert reward["value"] == 0.5


def test_no_credential_lies_open_in_the_processes_above_an_agent(thread: Thread) -> None:
    secrets = {sha256(path.read_bytes()).hexdigest(): path.name for path in thread.folder.secrets.iterdir()}
    for seen in thread.of("attack"):
        assert len(seen["ancestors"]) >= 3 and all(len(ancestor["words"]) > 1 for ancestor in seen["ancestors"])
        for ancestor in seen["ancestors"]:
            assert not [secrets[word] for word in ancestor["words"] if word in secrets]


def test_an_agent_inherits_no_descriptor(thread: Thread) -> None:
    for seen in thread.evidence:
        # The listing itself is one more, which is gone by the time that its link is read.
        opened = {name for name, target in seen["descriptors"].items() if target is not None}
        assert opened == {"0", "1", "2"}, seen["descriptors"]


def test_the_run_is_unaffected(thread: Thread) -> None:
    """Nothing was lost; the reward is the scorer's; the attempts that were attacked went on to their end."""
    assert thread.metrics["kitestring_gateway_attempts_lost_total",] == 0
    assert thread.result["rollouts"] == {"Succeeded": len(thread.evidence)}
    attackers = {seen["attempt"] for seen in thread.of("attack")}
    attempts = attackers.union(seen["attempt"] for seen in thread.of("gate"))
    found = list(read_attempts(thread.run.store(), attempts))
    assert len(found) == 2 * GROUP_SIZE
    for attempt in found:
        assert isinstance(attempt, ProvenAttempt)
        assert (attempt.end.n_calls, attempt.end.calls.ok) == (2, 2)
        assert attempt.end.calls.rejected == (OF_THE_ATTEMPT if attempt.attempt in attackers else 0)
        assert (attempt.end.reward, attempt.end.reward_source) == (1.0, "builtin")
