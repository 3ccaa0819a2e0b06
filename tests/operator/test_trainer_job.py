"""How a trainer ended: the verdict from Job and pods. What it left as its message is data of a process."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api import names
from kitestring_operator.trainer_job import FAILURES, MOST_DISRUPTIONS, EndKind, Losses, TrainerJob, parse_result

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)


def job(*conditions: str) -> dict[str, Any]:
    told = [{"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:09Z"} for kind in conditions]
    return {"kind": "Job", "metadata": {"name": "r-trainer-1", "uid": "u"}, "status": {"conditions": told}}


def pod(
    code: int | None = 1,
    *,
    index: int = 0,
    reason: str = "Error",
    message: str = "",
    container: str = "trainer",
    second: int | None = None,
    **status: Any,
) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{index + 1 if second is None else second:02}Z"
    ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}
    where = "initContainerStatuses" if container == "fetch" else "containerStatuses"
    states = [] if code is None else [{"name": container, "state": {"terminated": ended}}]
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    return {
        "kind": "Pod",
        "metadata": {"name": f"r-trainer-1-{index}", "labels": labels},
        "status": {where: states, **status},
    }


def with_sidecar(one: dict[str, Any], code: int) -> dict[str, Any]:
    """The pod with a sidecar of the user's, which ended before everything else."""
    ended = {"exitCode": code, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    states = [{"name": "proxy", "state": {"terminated": ended}}]
    return one | {"status": one["status"] | {"initContainerStatuses": states}}


def end(*pods: dict[str, Any], conditions: tuple[str, ...] = ("Failed",)) -> Any:
    return TrainerJob(job(*conditions), pods, 1, Losses(), NOW).end


REFUSED = {
    "kind": "Pod",
    "metadata": {"name": "r-trainer-1-0"},
    "status": {"phase": "Failed", "reason": "OutOfcpu", "message": "x"},
}
DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True", "message": "drained"}]}
RESULT = json.dumps({"phase": "Failed", "reason": "InvalidTasks", "message": "no row", "step": 0, "exit_code": 3})

AWAY = json.dumps({"phase": "Failed", "reason": "ScorerUnreachable", "message": "the scorer is away", "exit_code": 1})


@pytest.mark.parametrize(
    ("pods", "kind", "reason", "message"),
    [
        ([pod(3, message=RESULT)], EndKind.FAILED, "InvalidTasks", "no row"),
        (
            [pod(2, message="no JSON")],
            EndKind.FAILED,
            "Error",
            "container trainer of pod r-trainer-1-0 ended with code 2",
        ),
        (
            [pod(2, container="fetch")],
            EndKind.FAILED,
            "Error",
            "container fetch of pod r-trainer-1-0 ended with code 2",
        ),
        ([pod(137, reason="OOMKilled")], EndKind.LOST, "TrainerLost", "ended with code 137 (OOMKilled)"),
        ([pod(1, message=AWAY)], EndKind.LOST, "ScorerUnreachable", "the scorer is away"),
        ([pod(1, message=AWAY, container="proxy")], EndKind.LOST, "TrainerLost", "container proxy"),
        ([pod(137, message=AWAY)], EndKind.LOST, "TrainerLost", "ended with code 137"),
        ([pod(1, message=RESULT)], EndKind.LOST, "TrainerLost", "container trainer of pod r-trainer-1-0 ended"),
        ([pod(1)], EndKind.LOST, "TrainerLost", "container trainer of pod r-trainer-1-0 ended with code 1"),
        ([pod(137, **DISRUPTED)], EndKind.DISRUPTED, "TrainerLost", "pod r-trainer-1-0 was taken away: drained"),
        ([pod(143)], EndKind.DISRUPTED, "TrainerLost", "pod r-trainer-1-0 was told to stop"),
        ([], EndKind.DISRUPTED, "TrainerLost", "its pod was removed"),
        (
            [REFUSED],
            EndKind.LOST,
            "TrainerLost",
            "refused: OutOfcpu: x",
        ),
        # of several nodes: a verdict of any counts, else the cluster's doing, else the first that ended
        ([pod(1), pod(3, index=1, message=RESULT)], EndKind.FAILED, "InvalidTasks", "no row"),
        (
            [pod(1), pod(137, index=1, **DISRUPTED)],
            EndKind.DISRUPTED,
            "TrainerLost",
            "pod r-trainer-1-1 was taken away",
        ),
        ([pod(1, index=1), pod(134, index=0)], EndKind.LOST, "TrainerLost", "pod r-trainer-1-0 ended with code 134"),
        # one that crashed has the others told to stop: that is no disruption, which would never be counted
        ([pod(1), pod(143, index=1)], EndKind.LOST, "TrainerLost", "pod r-trainer-1-0 ended with code 1"),
        ([pod(1, second=3), pod(143, index=1, second=3)], EndKind.LOST, "TrainerLost", "ended with code 1"),
        ([pod(143), pod(1, index=1)], EndKind.DISRUPTED, "TrainerLost", "pod r-trainer-1-0 was told to stop"),
        # what a template brought besides has exit codes of its own
        (
            [with_sidecar(pod(137, reason="OOMKilled"), 143)],
            EndKind.LOST,
            "TrainerLost",
            "container trainer of pod r-trainer-1-0 ended with code 137 (OOMKilled)",
        ),
        ([with_sidecar(pod(1), 2)], EndKind.LOST, "TrainerLost", "container trainer"),
        ([with_sidecar(pod(None), 3)], EndKind.LOST, "TrainerLost", "container proxy"),
    ],
)
def test_a_failure(pods: list[dict[str, Any]], kind: EndKind, reason: str, message: str) -> None:
    found = end(*pods)
    assert (found.kind, found.reason) == (kind, reason)
    assert message in found.message


@pytest.mark.parametrize("condition", ["Complete", "SuccessCriteriaMet"])
def test_success_is_known_as_soon_as_it_is_certain(condition: str) -> None:
    done = json.dumps({"phase": "Finished", "reason": "Completed", "step": 3, "checkpoint": "s3://b/c/"})
    found = end(pod(0, message=done), conditions=(condition,))
    assert (found.kind, found.reason) == (EndKind.SUCCEEDED, "Completed")
    assert found.result.step == 3 and found.result.checkpoint == "s3://b/c/"


@pytest.mark.parametrize(
    ("before", "step", "code", "after"),
    [
        (Losses(1, 2, 5), 5, 1, Losses(2, 2, 5)),
        (Losses(1, 2, 5), 5, 143, Losses(1, 3, 5)),
        (Losses(1, 2, 5), 6, 143, Losses(1, 1, 6)),
        # restored at an earlier step, and not further than before
        (Losses(1, 2, 5), 3, 143, Losses(1, 3, 5)),
        (Losses(1, MOST_DISRUPTIONS, 5), 5, 143, Losses(2, MOST_DISRUPTIONS + 1, 5)),
        (Losses(1, MOST_DISRUPTIONS, 5), 6, 143, Losses(1, 1, 6)),
    ],
)
def test_disruptions_without_a_new_step_are_counted(before: Losses, step: int, code: int, after: Losses) -> None:
    assert TrainerJob(job("Failed"), (pod(code),), 1, before, NOW).losses(step) == after


def test_a_trainer_that_goes_on_has_no_end() -> None:
    assert end(conditions=()) is None
    assert end(pod(1), conditions=("Suspended",)) is None


@given(st.text(max_size=300))
def test_any_message_is_read_or_passed_over(text: str) -> None:
    found = parse_result(text)
    assert found is None or found.reason in FAILURES


@given(st.dictionaries(st.sampled_from(["reason", "message", "step", "checkpoint", "validation", "x"]), st.one_of(
    st.none(), st.text(), st.integers(), st.lists(st.integers()), st.floats(allow_nan=False))))  # fmt: skip
def test_any_object_is_read_or_passed_over(data: dict[str, Any]) -> None:
    found = parse_result(json.dumps(data))
    if found is not None:
        assert found.reason in FAILURES
        assert len(found.message or "") <= 1024 and (found.message or "").isprintable()


def test_a_reason_that_is_none_of_ours_is_an_error() -> None:
    found = parse_result('{"reason": "RewardMeMore"}')
    assert found is not None and found.reason == names.REASON_ERROR


@pytest.mark.parametrize(
    "pods",
    [[pod(1, second=59)], [pod(137, **DISRUPTED)], [], [REFUSED]],
    ids=["ended", "taken away", "gone", "refused"],
)
def test_it_ended_when_kubernetes_says_so_whatever_the_clock_of_its_node(pods: list[dict[str, Any]]) -> None:
    ended = job("FailureTarget", "Failed")
    certain, _ = ended["status"]["conditions"]
    certain["lastTransitionTime"] = "2026-01-01T00:00:07Z"
    found = TrainerJob(ended, tuple(pods), 1, Losses(), NOW).end
    assert found is not None and found.ended_at == datetime(2026, 1, 1, 0, 0, 7, tzinfo=UTC)


def deleted(one: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The pod, so long after the end of its grace period."""
    at = (NOW - timedelta(seconds=seconds)).isoformat()
    return one | {"metadata": one["metadata"] | {"deletionTimestamp": at}, "spec": {"nodeName": "worker-2"}}


@pytest.mark.parametrize(
    ("pods", "is_gone"),
    [
        ([deleted(pod(None, phase="Running"), 121)], True),
        ([deleted(pod(None, phase="Running"), 119)], False),
        ([pod(None, phase="Running")], False),
        # it ended: the Job will say so
        ([deleted(pod(143, phase="Failed"), 121)], False),
        # of several nodes, all: one that is silent alone may live, and its trainer go on
        ([pod(None, phase="Running"), deleted(pod(None, index=1, phase="Running"), 999)], False),
        ([deleted(pod(None, phase="Running"), 119), deleted(pod(None, index=1, phase="Running"), 121)], False),
        ([deleted(pod(None, phase="Running"), 121), deleted(pod(None, index=1, phase="Running"), 121)], True),
        ([pod(1, phase="Failed"), deleted(pod(None, index=1, phase="Running"), 121)], True),
    ],
)
def test_a_pod_whose_node_never_answers_again_has_been_taken_away(pods: list[dict[str, Any]], is_gone: bool) -> None:
    found = end(*pods, conditions=())
    assert (found is not None) == is_gone
    if found is not None:
        assert (found.kind, found.ended_at) == (EndKind.DISRUPTED, NOW - timedelta(seconds=1))
        assert found.message.endswith("was deleted and has not ended since; its node worker-2 does not answer")


def test_what_a_job_says_of_its_end_counts_before_what_its_pod_does_not_say() -> None:
    assert end(deleted(pod(None, phase="Running"), 999), conditions=("Complete",)).kind is EndKind.SUCCEEDED


@pytest.mark.parametrize(
    ("pods", "seconds"),
    [
        ([pod(None, phase="Running")], None),
        ([deleted(pod(None, phase="Running"), 100)], 20),
        ([deleted(pod(None, phase="Running"), 90), deleted(pod(None, index=1, phase="Running"), 100)], 30),
        # the other one keeps it from being given up, for as long as it lives: its end is an event
        ([pod(None, phase="Running"), deleted(pod(None, index=1, phase="Running"), 121)], None),
        ([deleted(pod(None, phase="Running"), 100), deleted(pod(None, index=1, phase="Running"), 121)], 20),
    ],
)
def test_it_is_looked_at_again_when_it_may_count_as_gone(pods: list[dict[str, Any]], seconds: float | None) -> None:
    assert TrainerJob(job(), tuple(pods), 1, Losses(), NOW).seconds_to_give_up == seconds
