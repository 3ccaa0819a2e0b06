"""The whole status of a run. Pure; what has not changed comes out as it stands, so that nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kitestring_api import names
from kitestring_api.v1alpha1.status import ConditionType, Phase
from kitestring_operator.acceptance import Refusal
from kitestring_operator.conditions import aspects, conditions, stamp
from kitestring_operator.lifecycle import Course, Gate
from kitestring_operator.observed import Event, Observed
from kitestring_operator.run_report import RolloutCounts, RunReport, latest
from kitestring_operator.trainer_job import EndKind

MESSAGE_LENGTH: Final = 4096
ERROR_LENGTH: Final = 4096
"""Of `lastError`, without the line that says what and where."""
ETA_CHANGE: Final = 0.1
"""A new estimate of the end is written when it differs by this share, or by..."""
ETA_CHANGE_SECONDS: Final = 10

_COUNTERS: Final = (
    "reward",
    "validationBefore",
    "validation",
    "rolloutsRunning",
    "rolloutsSucceeded",
    "rolloutsFailed",
    "rolloutsRetried",
    "rolloutsExcluded",
    "skippedSteps",
    "tokens",
    "checkpoint",
)
"""What the trainer alone knows: it stays as it was while the trainer does not answer."""
_NOT_URGENT: Final = frozenset({*_COUNTERS, "etaSeconds", "message"}) - {"checkpoint"}
"""Fields whose change may wait a little."""


def status_of(
    observed: Observed, course: Course, refusal: Refusal | None, gate: Gate, report: RunReport | None
) -> dict[str, Any]:
    """`status` as it is to stand in the cluster."""
    before = observed.status
    steps = before.get("steps") if observed.spec is None else observed.spec.steps
    fields: dict[str, Any] = {
        "observedGeneration": observed.generation,
        "phase": str(course.phase),
        "reason": course.reason,
        "message": course.message[:MESSAGE_LENGTH],
        "conditions": conditions(
            aspects(observed, course, refusal, gate, report),
            before.get("conditions") or (),
            observed.generation,
            observed.now,
        ),
        "steps": steps,
        "step": _step(before, course, report),
        **{field: before.get(field) for field in _COUNTERS},
        **_counted(course, report),
        "restarts": course.restarts if course.started_at is not None else None,
        "etaSeconds": _eta(before, course, report),
        "startTime": before.get("startTime") or (stamp(course.started_at) if course.started_at else None),
        "completionTime": before.get("completionTime") or (stamp(course.completed_at) if course.completed_at else None),
        "lastError": _last_error(observed, course),
    }
    return {field: value for field, value in fields.items() if value is not None}


def classes_of(course: Course, report: RunReport | None) -> Mapping[str, int] | None:
    """Committed rollouts of the whole run by failure class, as its trainer left them or else says them; None: nobody
    has said any, as while a trainer is being restored."""
    result = None if course.end is None else course.end.result
    if result is not None and result.rollouts is not None:
        return result.rollouts.classes
    return (report.rollouts.classes or None) if report is not None else None


def is_urgent(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether the statuses differ in more than counters."""
    return any(before.get(field) != after.get(field) for field in (before.keys() | after.keys()) - _NOT_URGENT)


def events_of(observed: Observed, after: Mapping[str, Any]) -> tuple[Event, ...]:
    """What a user wants to read about the change from the status that stands to the one that follows."""
    before = observed.status
    found = []
    if before.get("phase") != after["phase"] or before.get("reason") != after["reason"]:
        phase = Phase(after["phase"])
        bad = phase in (Phase.FAILED, Phase.RESTARTING) or after["reason"] in _WARNINGS
        found.append(Event("Warning" if bad else "Normal", after["reason"], f"{phase}: {after['message']}"[:1024]))
    old = {entry["type"]: (entry["status"], entry["reason"]) for entry in before.get("conditions") or ()}
    for entry in after["conditions"]:
        stood, stands = old.get(entry["type"], ("", "")), (entry["status"], entry["reason"])
        is_alarm = after["phase"] == Phase.RUNNING and (entry["type"], entry["status"]) in _ALARMS
        cannot_start = entry["type"] in _PARTS and entry["status"] == "False" and entry["reason"] in _CANNOT_START
        if cannot_start and stands != stood and entry["message"] != after["message"]:
            found.append(Event("Warning", entry["reason"], entry["message"][:1024]))
        if is_alarm and entry["status"] != stood[0]:
            found.append(Event("Warning", entry["reason"], entry["message"]))
    if after.get("skippedSteps", 0) > before.get("skippedSteps", 0):
        message = f"{after['skippedSteps']} steps had no group to learn from"
        found.append(Event("Warning", names.REASON_STEPS_SKIPPED, message))
    return tuple(found)


_ALARMS: Final = frozenset({(ConditionType.DEGRADED, "True"), (ConditionType.PROGRESSING, "False")})
"""Conditions whose coming is said in an event, while the phase stays as it is."""
_PARTS: Final = frozenset({ConditionType.INFERENCE_READY, ConditionType.ROLLOUTS_READY})
_CANNOT_START: Final = frozenset({names.REASON_IMAGE_PULL, names.REASON_CONTAINER_START})
"""Why a part is not ready that is said in an event too, in any phase: a trainer may work while no agent ever starts."""
_WARNINGS: Final = frozenset(
    {
        names.REASON_INVALID_SPEC,
        names.REASON_NOT_SUPPORTED,
        names.REASON_POOL_NOT_FOUND,
        names.REASON_REFERENCE_NOT_FOUND,
        *_CANNOT_START,
        names.REASON_PREEMPTED,
        names.REASON_SUSPENDED_BY_OTHERS,
        names.REASON_ERROR,
    }
)


def _step(before: Mapping[str, Any], course: Course, report: RunReport | None) -> int | None:
    if course.end is not None and course.end.result is not None and course.end.result.step is not None:
        return course.end.result.step
    if report is None or report.step == 0:
        # a trainer that is being restored does not know yet how far the run had come
        known: int | None = before.get("step", 0 if course.started_at is not None else None)
        return known
    return report.steps_done


def _counted(course: Course, report: RunReport | None) -> dict[str, Any]:
    """What the trainer reports, or left when it ended; only what is known."""
    known: dict[str, Any] = {}
    if report is not None:
        known = {
            "reward": report.reward,
            "validationBefore": report.validated_before,
            "validation": report.validated,
            "rolloutsRunning": report.rollouts.running,
            **_totals(report.rollouts),
            "skippedSteps": report.skipped_steps,
            "tokens": report.tokens,
            "checkpoint": report.checkpoint,
        }
    if course.end is not None and course.end.result is not None:
        result = course.end.result
        left = {
            "reward": result.reward,
            "validation": latest(result.validation),
            **({} if result.rollouts is None else _totals(result.rollouts)),
            "skippedSteps": result.skipped_steps,
            "tokens": result.tokens,
            "checkpoint": result.checkpoint,
        }
        known |= {field: value for field, value in left.items() if value is not None}
    if course.phase not in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING) and course.started_at is not None:
        known["rolloutsRunning"] = 0
    return {field: value for field, value in known.items() if value is not None}


def _totals(counts: RolloutCounts) -> dict[str, int]:
    """Rollouts of the whole run."""
    return {
        "rolloutsSucceeded": counts.classes.get(names.CLASS_SUCCEEDED, 0),
        "rolloutsFailed": counts.failed,
        "rolloutsRetried": counts.retried,
        "rolloutsExcluded": counts.excluded,
    }


def _eta(before: Mapping[str, Any], course: Course, report: RunReport | None) -> int | None:
    if course.phase is not Phase.RUNNING:
        return None
    old: int | None = before.get("etaSeconds")
    if report is None or report.eta_seconds is None:
        return old
    new = round(report.eta_seconds)
    if old is not None and abs(new - old) <= max(ETA_CHANGE_SECONDS, ETA_CHANGE * old):
        return old
    return new


def _last_error(observed: Observed, course: Course) -> str | None:
    """What the newest trainer that ended badly said last; the one before that where it said nothing."""
    end = course.end
    before: str | None = observed.status.get("lastError")
    if end is None or end.kind not in (EndKind.LOST, EndKind.FAILED):
        return before
    where = f"pod {end.pod}" if end.pod is not None else "the trainer"
    head = f"{where}: {end.message}"
    if not observed.trainer_log:
        return before if before is not None and before.startswith(head) else head
    return f"{head}\n{observed.trainer_log[-ERROR_LENGTH:]}"
