"""The status: what is written, what stays, and what is only a matter of counters."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kitestring_api.v1alpha1.status import TrainingRunStatus
from kitestring_api.v1alpha1.training_run import TrainingRunSpec
from kitestring_operator.acceptance import Refusal
from kitestring_operator.lifecycle import Gate, course
from kitestring_operator.observed import Objects, Observed, TrainerReport
from kitestring_operator.run_report import RunReport
from kitestring_operator.status import events_of, is_urgent, status_of
from tests.operator.documents import run
from tests.operator.world import report

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
JOB = {
    "kind": "Job",
    "apiVersion": "batch/v1",
    "metadata": {"name": "t", "uid": "j", "labels": {"app.kubernetes.io/component": "trainer"}, "annotations": {}},
    "status": {"active": 1},
}


def observed(said: RunReport | None = None, age: float = 0.0, **status: Any) -> Observed:
    document = run()
    document["metadata"] |= {"uid": "u", "generation": 4}
    document["status"] = status
    return Observed(
        now=NOW,
        run=document,
        spec=TrainingRunSpec.from_manifest(document["spec"]),
        problems=(),
        pool=None,
        objects=Objects((JOB,)),
        trainer=None if said is None else TrainerReport(said.model_dump(), age),
    )


def status(seen: Observed, refusal: Refusal | None = None) -> dict[str, Any]:
    said = None if seen.trainer is None else RunReport.model_validate(seen.trainer.status)
    return status_of(seen, course(seen, refusal, Gate()), refusal, Gate(), said)


def condition(found: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(entry for entry in found["conditions"] if entry["type"] == kind)


FULL = report(
    "RollingOut",
    3,
    reward=0.25,
    tokens=99,
    skipped_steps=1,
    eta_seconds=100.4,
    checkpoint="s3://b/p/checkpoints/step-000002/",
    rollouts={
        "running": 5,
        "retried": 2,
        "excluded": 1,
        "classes": {"Succeeded": 10, "AgentFailed": 3, "TimedOut": 4, "Infrastructure": 1},
    },
    validation=(
        {"step": 0, "mode": "validation-greedy", "reward": 0.9},
        {"step": 0, "mode": "validation-sampled", "reward": 0.1},
        {"step": 2, "mode": "validation-sampled", "reward": 0.3},
        {"step": 1, "mode": "validation-sampled", "reward": 0.2},
    ),
)


def test_what_the_trainer_says() -> None:
    found = status(observed(FULL))
    TrainingRunStatus.from_manifest(found)
    assert found | {"conditions": 0} == {
        "observedGeneration": 4,
        "phase": "Running",
        "reason": "Running",
        "message": "step 3 of 3: rollouts run",
        "conditions": 0,
        "steps": 3,
        "step": 2,
        "reward": 0.25,
        "validationBefore": 0.1,
        "validation": 0.3,
        "rolloutsRunning": 5,
        "rolloutsSucceeded": 10,
        "rolloutsFailed": 7,
        "rolloutsRetried": 2,
        "rolloutsExcluded": 1,
        "skippedSteps": 1,
        "tokens": 99,
        "checkpoint": "s3://b/p/checkpoints/step-000002/",
        "restarts": 0,
        "etaSeconds": 100,
        "startTime": "2026-01-01T12:00:00Z",
    }


def test_from_the_same_comes_the_same() -> None:
    first = status(observed(FULL))
    seen = observed(FULL, **first)
    later = replace(seen, now=NOW + timedelta(hours=1))
    assert status(later) == first, "time alone changes nothing"
    assert events_of(later, first) == ()


def test_what_is_known_stays_while_the_trainer_does_not_answer() -> None:
    first = status(observed(FULL))
    found = status(observed(None, **first))
    assert found["phase"] == "Running"
    for field in ("step", "reward", "validation", "rolloutsSucceeded", "tokens", "checkpoint", "etaSeconds"):
        assert found[field] == first[field]
    assert condition(found, "TrainerReady")["status"] == "False"
    silent = status(observed(FULL, age=60.0, **first))
    assert condition(silent, "TrainerReady")["message"] == "the trainer does not answer"


def test_a_trainer_that_is_being_restored_does_not_take_steps_back() -> None:
    first = status(observed(FULL))
    assert status(observed(report("Starting", 0), **first))["step"] == 2


@pytest.mark.parametrize(("eta", "written"), [(95.0, 100), (91.0, 100), (89.0, 89), (None, 100), (130.0, 130)])
def test_the_estimate_of_the_end_does_not_tick(eta: float | None, written: int) -> None:
    first = status(observed(FULL))
    assert status(observed(report("RollingOut", 3, eta_seconds=eta), **first))["etaSeconds"] == written


def test_counters_are_not_urgent_and_everything_else_is() -> None:
    first = status(observed(FULL))
    assert not is_urgent(first, first | {"tokens": 100, "rolloutsRunning": 1, "etaSeconds": 3, "message": "x"})
    for change in ({"step": 3}, {"phase": "Failed"}, {"checkpoint": "s3://"}, {"conditions": []}, {"lastError": "x"}):
        assert is_urgent(first, first | change)


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    first = status(observed(FULL))
    later = replace(observed(report(degraded=True), **first), now=NOW + timedelta(seconds=30))
    found = status(later)
    assert condition(found, "TrainerReady")["lastTransitionTime"] == "2026-01-01T12:00:00Z"
    assert condition(found, "Degraded")["lastTransitionTime"] == "2026-01-01T12:00:30Z"
    assert condition(found, "Degraded")["reason"] == "ProbabilitiesDiverge"
    assert [event.reason for event in events_of(later, found)] == ["ProbabilitiesDiverge"]


def test_a_run_whose_latest_steps_are_skipped_is_degraded() -> None:
    found = condition(status(observed(report(skipped_in_row=2))), "Degraded")
    assert (found["status"], found["reason"]) == ("True", "StepsSkipped")
    assert found["message"] == "the last 2 steps had no group to learn from"


def test_a_step_that_takes_much_longer_than_steps_do_is_stalled() -> None:
    slow = FULL.model_copy(update={"since_step_seconds": 900.0, "step_seconds": 100.0})
    found = status(observed(slow))
    assert (condition(found, "Progressing")["status"], condition(found, "Progressing")["reason"]) == (
        "False",
        "Stalled",
    )
    usual = FULL.model_copy(update={"since_step_seconds": 900.0, "step_seconds": 300.0})
    assert condition(status(observed(usual)), "Progressing")["status"] == "True"


def test_a_refusal_does_not_stop_what_runs() -> None:
    first = status(observed(FULL))
    refusal = Refusal("PoolNotFound", "there is no pool")
    found = status(observed(FULL, **first), refusal)
    assert (found["phase"], found["reason"]) == ("Running", "PoolNotFound")
    assert condition(found, "Accepted")["status"] == "False"
    assert condition(found, "Finished")["status"] == "False"


def test_every_condition_says_which_generation_it_is_about() -> None:
    assert {entry["observedGeneration"] for entry in status(observed(FULL))["conditions"]} == {4}


def after_the_change(before: dict[str, Any], said: RunReport) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The status that an operator writes which takes over, before its first question and after, and its events."""
    silent = observed(None, **before)
    unasked = status(silent)
    asked = observed(said, **unasked)
    after = status(asked)
    told = (*events_of(silent, unasked), *events_of(asked, after))
    return after, tuple(event.reason for event in told)


@pytest.mark.parametrize(
    ("said", "kind", "reason"),
    [
        (report(degraded=True), "Degraded", "ProbabilitiesDiverge"),
        (report(skipped_in_row=2), "Degraded", "StepsSkipped"),
        (report(reason="StorageUnavailable", message="it is away"), "Degraded", "StorageUnavailable"),
        (report(step=2, since_step_seconds=1000.0, step_seconds=10.0), "Progressing", "Stalled"),
    ],
)
def test_another_operator_changes_no_condition_before_it_knows_better(said: RunReport, kind: str, reason: str) -> None:
    before = status(observed(said))
    assert condition(before, kind)["reason"] == reason
    # it has just begun to measure
    heard = said.model_copy(update={"since_step_seconds": 0.0, "step_seconds": None})
    after, events = after_the_change(before, heard)
    assert (after, events) == (before, ())


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_that_was_stalled_progresses_with_its_next_step(step: int) -> None:
    stalled = report(step=step, since_step_seconds=1000.0, step_seconds=10.0)
    before = status(observed(stalled))
    made = status(observed(stalled.model_copy(update={"made_step": step}), **before))
    assert condition(made, "Progressing")["reason"] == "Stalled", "made late, and not over"
    after = status(observed(report(step=step + 1, made_step=step, since_step_seconds=0.0), **made))
    assert condition(after, "Progressing")["status"] == "True"


def test_a_trainer_that_is_started_again_is_not_stalled() -> None:
    before = status(observed(report(step=2, since_step_seconds=1000.0, step_seconds=10.0)))
    starting = status(observed(report("Starting", 0), **before))
    assert (starting["phase"], condition(starting, "Progressing")["status"]) == ("Restarting", "Unknown")
    after = status(observed(report(step=2, since_step_seconds=0.0), **starting))
    assert condition(after, "Progressing")["status"] == "True"
