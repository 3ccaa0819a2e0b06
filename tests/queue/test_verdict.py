"""What attempts count as, and what is left of them after a restart: pure functions on records."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api.names import CLASS_AGENT_FAILED, CLASS_INFRASTRUCTURE, CLASS_SUCCEEDED, CLASS_TIMED_OUT
from kitestring_rollout.protocol.queue import Finish
from kitestring_rollout.traces.records import (
    UNREACHABLE,
    AttemptIdentity,
    CallRecord,
    ChoiceRecord,
    EndRecord,
    VersionSpan,
)
from kitestring_trainer.commits import CommittedRollout, StepCommit
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.outcome import committed_rollouts
from kitestring_trainer.plan import plan_training_step
from kitestring_trainer.queue.proofs import Proof
from kitestring_trainer.queue.rollouts import RolloutResult
from kitestring_trainer.queue.state import Ending, Final, Tries, replay
from kitestring_trainer.queue.verdict import classify, judge
from kitestring_trainer.restoring import recommitted, remains

PLAN = plan_training_step(seed=0, step=3, n_tasks=4, tasks_per_step=2, group_size=2)
FIRST = PLAN.rollouts[0]
AWAY = f"{UNREACHABLE}: no server of model 'policy' can be reached"
_numbers = count(1)


def identity(rollout: str, attempt: str) -> AttemptIdentity:
    return AttemptIdentity("run", rollout, attempt, rollout[:16], 0, 3, "train", "e")


def call(who: AttemptIdentity, seq: int, version: str = "1.2", **changes: Any) -> CallRecord:
    choice = ChoiceRecord(0, np.array([7], np.int32), np.zeros(1, np.float32), (VersionSpan(version, 0, 1),))
    fields: dict[str, Any] = {"trained": True, "outcome": "ok", "status": 200, "choices": (choice,)} | changes
    return CallRecord(who, seq, "chat", "policy", "policy", started_unix_nano=0, ended_unix_nano=1, **fields)


def proof(rollout: str, outcome: str = CLASS_SUCCEEDED, *, version: str = "1.2", **changes: Any) -> Proof:
    who = identity(rollout, f"attempt-{next(_numbers):06d}")
    calls = changes.pop("calls", lambda who: (call(who, 1, version),))(who)
    fields: dict[str, Any] = {"reward": 1.0, "reward_source": "builtin"} | changes
    end = EndRecord(who, len(calls), "digest", outcome, started_unix_nano=0, ended_unix_nano=1, **fields)
    return Proof(who.attempt, end, calls)


def accepted(version: str) -> bool:
    return version in ("1.2", "2.2")


@pytest.mark.parametrize("field", ["log_tail", "message"])
def test_no_reason_speaks_to_a_terminal(field: str) -> None:
    """An agent says its last line, and may write what the cluster passes on as the last words of its container."""
    said = {field: "\x1b]0;mine\x07\x1b[2Jall \x9bwell\u202e: ünïcödé ☃"}
    finish = Finish(attempt="a", ended="exited", exit_code=1, seconds=1.0, **said)
    assert classify(finish, 1.0) == (CLASS_AGENT_FAILED, "exit code 1: ]0;mine[2Jall well: ünïcödé ☃")


def test_a_reason_is_one_line() -> None:
    finish = Finish(attempt="a", ended="executorLost", seconds=1.0, message="lost\r\nERROR forged\u2028more")
    _, reason = classify(finish, 1.0)
    assert reason is not None and reason.splitlines() == [reason] and "lost ERROR forged more" in reason


def test_a_proven_attempt_is_what_its_end_record_says() -> None:
    found = proof(FIRST)
    ending = judge(found.end, found.calls, accepted)
    assert ending == Ending(CLASS_SUCCEEDED, None, 1.0, "builtin", "e", 1, "digest")


@pytest.mark.parametrize("outcome", [CLASS_AGENT_FAILED, CLASS_TIMED_OUT])
@pytest.mark.parametrize(
    ("failed", "klass"),
    [
        ({"outcome": "failed", "status": 502, "error": AWAY}, CLASS_INFRASTRUCTURE),
        ({"outcome": "failed", "status": 503, "error": AWAY, "trained": False}, CLASS_INFRASTRUCTURE),
        ({"outcome": "failed", "status": 502, "error": "upstream_error: overloaded"}, None),
        ({"outcome": "failed", "status": 502, "error": f"upstream_error: {AWAY}"}, None),
        ({"outcome": "failed", "status": 502, "error": "upstream_malformed: not JSON"}, None),
        ({"outcome": "failed", "status": 500, "error": "upstream_error: division by zero"}, None),
        ({"outcome": "failed", "status": 500, "error": "TypeError"}, None),
        ({"outcome": "failed", "status": 400, "error": "upstream_error: too long"}, None),
        ({"outcome": "failed", "status": None, "error": AWAY}, None),
        ({"outcome": "cancelled", "status": 502, "error": AWAY}, None),
    ],
)
def test_an_agent_that_failed_after_its_model_did(outcome: str, failed: dict[str, Any], klass: str | None) -> None:
    found = proof(
        FIRST, outcome, calls=lambda who: (call(who, 1), call(who, 2, choices=(), **failed)), reason="exit code 1"
    )
    ending = judge(found.end, found.calls, accepted)
    assert ending.klass == (klass or outcome)
    if klass:
        assert ending.reward is None
        assert "call 2" in (ending.reason or "") and "exit code 1" in (ending.reason or "")


def test_an_outage_excuses_nothing_once_a_model_answered_again() -> None:
    away = {"choices": (), "outcome": "failed", "status": 502, "error": AWAY}
    for later, klass in (
        ((), CLASS_INFRASTRUCTURE),
        ((("cancelled", None),), CLASS_INFRASTRUCTURE),
        ((("ok", 200),), CLASS_AGENT_FAILED),
        ((("failed", 400), ("cancelled", None)), CLASS_AGENT_FAILED),
        ((("undelivered", 200),), CLASS_AGENT_FAILED),
    ):
        calls = [
            (away, 1),
            *(({"outcome": outcome, "status": status}, 2 + i) for i, (outcome, status) in enumerate(later)),
        ]
        found = proof(
            FIRST,
            CLASS_AGENT_FAILED,
            calls=lambda who, calls=calls: tuple(call(who, seq, **given) for given, seq in calls),
        )
        assert judge(found.end, found.calls[::-1], accepted).klass == klass, later


def test_an_agent_that_coped_with_a_failing_model_has_succeeded() -> None:
    found = proof(FIRST, calls=lambda who: (call(who, 1, choices=(), outcome="failed", status=502), call(who, 2)))
    assert judge(found.end, found.calls, accepted).klass == CLASS_SUCCEEDED


def test_tokens_of_other_weights_make_an_attempt_useless() -> None:
    found = proof(FIRST, version="1.1")
    ending = judge(found.end, found.calls, accepted)
    assert (ending.klass, ending.reward) == (CLASS_INFRASTRUCTURE, None)
    assert ending.reason == "call 1 was sampled from policy version 1.1, which is not trained now"
    assert judge(found.end, found.calls, None).klass == CLASS_SUCCEEDED


def test_frozen_models_have_no_version_to_be_wrong() -> None:
    found = proof(FIRST, calls=lambda who: (call(who, 1, version="judge-2", trained=False),))
    assert judge(found.end, found.calls, accepted).klass == CLASS_SUCCEEDED


def test_what_is_left_of_a_plan() -> None:
    failed, again = proof(FIRST, CLASS_INFRASTRUCTURE), proof(FIRST)
    stale = proof(PLAN.rollouts[1], version="1.1")
    unlucky = proof(PLAN.rollouts[2], CLASS_INFRASTRUCTURE)
    left = remains(PLAN, [again, stale, failed, unlucky, proof("t000009-00000000-000")], accepted, Tries(total=3))
    assert left.superseded == (stale.attempt,)
    assert set(left.restored) == {FIRST, PLAN.rollouts[2]}
    first = left.restored[FIRST]
    assert first.final == Final(FIRST, again.attempt, judge(again.end, again.calls, accepted), 2)
    assert first.proof is again
    assert left.restored[PLAN.rollouts[2]].final is None
    assert left.restored[PLAN.rollouts[2]].counts == Counter({CLASS_INFRASTRUCTURE: 1})


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([CLASS_SUCCEEDED, CLASS_AGENT_FAILED, CLASS_INFRASTRUCTURE]))
    ),
    st.randoms(),
)
def test_the_order_of_discovery_does_not_matter(ended: list[tuple[int, str]], random: Any) -> None:
    proofs = [proof(PLAN.rollouts[index], outcome) for index, outcome in ended]
    tries = Tries(total=3, agent_failed=2)
    straight = remains(PLAN, proofs, accepted, tries)
    shuffled = list(proofs)
    random.shuffle(shuffled)
    assert remains(PLAN, shuffled, accepted, tries) == straight
    used = sum(known.counts.total() for known in straight.restored.values())
    assert used + len(straight.superseded) == len(proofs), "every ended attempt is accounted for"


@given(st.lists(st.sampled_from([CLASS_AGENT_FAILED, CLASS_TIMED_OUT, CLASS_INFRASTRUCTURE, CLASS_SUCCEEDED])))
def test_replay_stops_at_the_end(classes: list[str]) -> None:
    tries = Tries(total=4, agent_failed=2, timed_out=1)
    counts, final = replay(FIRST, [(f"a{i}", Ending(klass)) for i, klass in enumerate(classes)], tries)
    assert counts.total() <= 4
    if final is not None:
        assert final.attempt == f"a{counts.total() - 1}"
        assert final.ending.klass == classes[counts.total() - 1]
    else:
        assert counts.total() == len(classes)


def committed(found: Proof | None, **changes: Any) -> CommittedRollout:
    fields: dict[str, Any] = {
        "rollout": found.end.rollout if found else FIRST,
        "group": "g",
        "task": 0,
        "klass": CLASS_SUCCEEDED,
        "reason": None,
        "attempt": found.attempt if found else None,
        "tries": 1,
        "epoch": "e",
        "n_calls": 1,
        "digest": "digest",
        "reward": 1.0,
        "reward_source": "builtin",
        "excluded": None,
    }
    return CommittedRollout(**(fields | changes))


def commit_of(*rollouts: CommittedRollout) -> StepCommit:
    return StepCommit("run", "train", 3, 1, "1.2", 0.0, rollouts)


def test_a_commit_is_its_json() -> None:
    commit = commit_of(committed(proof(FIRST)), committed(None, klass=CLASS_INFRASTRUCTURE, excluded="x", reward=None))
    assert StepCommit.from_json(commit.to_json()) == commit
    assert commit.to_json()["rollouts"][0]["class"] == CLASS_SUCCEEDED


def test_a_committed_step_is_made_again_from_the_same_attempts() -> None:
    found = proof(FIRST)
    lost = committed(
        None, rollout=PLAN.rollouts[1], attempt="gone", klass=CLASS_INFRASTRUCTURE, excluded="x", reward=None, tries=3
    )
    restored = recommitted(commit_of(committed(found), lost), [found], Tries())
    results = [
        RolloutResult(rollout, "g", 0, known.final, known.proof)
        for rollout, known in restored.items()
        if known.final is not None
    ]
    assert [r.excluded for r in committed_rollouts(results, 1)] == [None, CLASS_INFRASTRUCTURE]
    assert committed_rollouts(results, 1)[0] == committed(found)


@pytest.mark.parametrize("change", [{"digest": "another"}, {"n_calls": 2}])
def test_a_committed_step_whose_traces_changed_is_not_made_again(change: dict[str, Any]) -> None:
    found = proof(FIRST)
    with pytest.raises(RunFailedError, match="not in storage any more"):
        recommitted(commit_of(committed(found, **change)), [found], Tries())
    with pytest.raises(RunFailedError, match="not in storage any more"):
        recommitted(commit_of(committed(found)), [], Tries())
