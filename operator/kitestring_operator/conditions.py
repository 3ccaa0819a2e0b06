"""The conditions of a run. Pure: time passes only where a condition changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from kitestring_api import names
from kitestring_api.v1alpha1.status import ConditionType, Phase
from kitestring_operator.acceptance import Refusal
from kitestring_operator.lifecycle import Course, Gate
from kitestring_operator.observed import Observed
from kitestring_operator.pods import is_ready, trouble
from kitestring_operator.run_report import RunReport
from kitestring_operator.trainer_job import pods_of

ANSWER_SECONDS: Final = 30.0
"""A trainer that has not answered for so long is not ready."""
STALL_FACTOR: Final = 4.0
"""A step that takes so many times the longest one so far counts as stalled."""
MESSAGE_LENGTH: Final = 4096
"""Of a condition, as our API has it. What others say of a run may be longer: Kueue's conditions hold 32 KiB."""
SHORTEST_STALL_SECONDS: Final = 600.0


class Aspect(NamedTuple):
    """One condition, before it has a time."""

    type: ConditionType
    holds: bool | None
    """None: unknown."""
    reason: str
    message: str = ""


class Replicas(NamedTuple):
    """How much of a part is ready, and how much there is to be."""

    ready: int
    wanted: int


def aspects(
    observed: Observed, course: Course, refusal: Refusal | None, gate: Gate, report: RunReport | None
) -> list[Aspect]:
    """What holds of a run, in the order in which it comes about."""
    found = [_accepted(refusal)]
    if observed.queue_name is not None:
        found.append(Aspect(ConditionType.ADMITTED, gate.is_open, gate.reason, gate.message))
    if course.started_at is not None:
        if course.phase in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING):
            found += [_trainer_ready(observed, course), _inference_ready(observed), _rollouts_ready(observed)]
            found += [_progressing(observed, course, report), _degraded(observed, course, report)]
        else:
            found += [
                Aspect(kind, False, course.reason)
                for kind in (
                    ConditionType.TRAINER_READY,
                    ConditionType.INFERENCE_READY,
                    ConditionType.ROLLOUTS_READY,
                    ConditionType.PROGRESSING,
                    ConditionType.DEGRADED,
                )
            ]
    had = {entry["type"] for entry in observed.status.get("conditions") or ()}
    stopped = course.phase is Phase.SUSPENDED or (course.phase is Phase.QUEUED and course.started_at is not None)
    if stopped or ConditionType.SUSPENDED in had:
        found.append(Aspect(ConditionType.SUSPENDED, stopped, course.reason))
    message = course.message if course.phase.is_final else ""
    found.append(Aspect(ConditionType.FINISHED, course.phase.is_final, course.reason, message))
    return found


def conditions(
    found: Iterable[Aspect], before: Sequence[Mapping[str, Any]], generation: int, now: datetime
) -> list[dict[str, Any]]:
    """The conditions as the status has them. `before`: those that stand there now."""
    known = {entry["type"]: entry for entry in before}
    result = []
    for aspect in found:
        holds = "Unknown" if aspect.holds is None else str(aspect.holds)
        old = known.get(aspect.type)
        since = old["lastTransitionTime"] if old is not None and old["status"] == holds else stamp(now)
        result.append(
            {
                "type": str(aspect.type),
                "status": holds,
                "observedGeneration": generation,
                "lastTransitionTime": since,
                "reason": aspect.reason,
                "message": aspect.message[:MESSAGE_LENGTH],
            }
        )
    return result


def stamp(time: datetime) -> str:
    """A time as Kubernetes writes it: UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _accepted(refusal: Refusal | None) -> Aspect:
    if refusal is None:
        return Aspect(ConditionType.ACCEPTED, True, names.REASON_ACCEPTED)
    return Aspect(ConditionType.ACCEPTED, False, refusal.reason, refusal.message)


def _trainer_ready(observed: Observed, course: Course) -> Aspect:
    held = None if course.trainer is None else course.trainer.suspension
    if held is not None:
        return Aspect(ConditionType.TRAINER_READY, False, names.REASON_SUSPENDED_BY_OTHERS, held)
    if course.trainer is not None and course.end is None and observed.trainer is not None:
        if observed.trainer.age_seconds < ANSWER_SECONDS:
            return Aspect(ConditionType.TRAINER_READY, True, names.REASON_RUNNING)
        return Aspect(ConditionType.TRAINER_READY, False, names.REASON_RUNNING, "the trainer does not answer")
    if course.phase is Phase.RUNNING and any(map(is_ready, pods_of(observed, names.COMPONENT_TRAINER))):
        # asked for nothing yet by this operator, but ready by its own probe: a new operator changes nothing
        return Aspect(ConditionType.TRAINER_READY, True, names.REASON_RUNNING)
    return _not_ready(observed, ConditionType.TRAINER_READY, "it has not answered yet", names.COMPONENT_TRAINER)


def _inference_ready(observed: Observed) -> Aspect:
    servers = replicas_of(observed, "StatefulSet", names.COMPONENT_POLICY_SERVER)
    if servers.ready >= servers.wanted:
        return Aspect(ConditionType.INFERENCE_READY, True, names.REASON_RUNNING)
    message = _ready(servers, "policy servers")
    return _not_ready(observed, ConditionType.INFERENCE_READY, message, names.COMPONENT_POLICY_SERVER)


def _rollouts_ready(observed: Observed) -> Aspect:
    gateways = replicas_of(observed, "StatefulSet", names.COMPONENT_GATEWAY)
    collectors = replicas_of(observed, "Deployment", names.COMPONENT_COLLECTOR)
    waits = []
    if gateways.ready == 0:
        waits.append(_ready(gateways, "gateways"))
    if collectors.ready == 0:
        waits.append(_ready(collectors, "collectors"))
    if observed.pool is not None and observed.pool.spec.reward.scorer is not None:
        scorers = replicas_of(observed, "Deployment", names.COMPONENT_SCORER)
        if scorers.ready == 0:
            waits.append(_ready(scorers, "scorers"))
    if observed.pool is not None and observed.pool.spec.isolation == "Worker":
        workers = pods_of(observed, names.COMPONENT_ROLLOUT)
        if not any(is_ready(pod) for pod in workers):
            waits.append(f"0 of {observed.pool.spec.replicas} workers ready")
    elif names.COMPONENT_ROLLOUT in observed.refused_pods and not pods_of(observed, names.COMPONENT_ROLLOUT):
        waits.append("no rollout has a pod")
    if not waits:
        return Aspect(ConditionType.ROLLOUTS_READY, True, names.REASON_RUNNING)
    parts = (
        names.COMPONENT_GATEWAY,
        names.COMPONENT_COLLECTOR,
        names.COMPONENT_SCORER,
        names.COMPONENT_ROLLOUT,
    )
    return _not_ready(observed, ConditionType.ROLLOUTS_READY, ", ".join(waits), *parts)


def _not_ready(observed: Observed, kind: ConditionType, message: str, *components: str) -> Aspect:
    for pod in pods_of(observed, *components):
        found = trouble(pod)
        if found is not None:
            return Aspect(kind, False, found.reason or names.REASON_STARTING, found.message)
    refused = [observed.refused_pods[component] for component in components if component in observed.refused_pods]
    return Aspect(kind, False, names.REASON_STARTING, refused[0] if refused else message)


def _progressing(observed: Observed, course: Course, report: RunReport | None) -> Aspect:
    if course.phase is not Phase.RUNNING:
        return Aspect(ConditionType.PROGRESSING, None, course.reason)
    stands = _standing(observed, ConditionType.PROGRESSING)
    if report is None and stands is not None:
        return stands
    if report is not None and report.since_step_seconds is not None:
        longest = max(STALL_FACTOR * (report.step_seconds or 0.0), SHORTEST_STALL_SECONDS)
        if report.since_step_seconds > longest:
            message = f"{_step(report)}has taken more than {longest:.0f} s"
            return Aspect(ConditionType.PROGRESSING, False, names.REASON_STALLED, message)
        was_stalled = stands is not None and stands.reason == names.REASON_STALLED
        if stands is not None and was_stalled and stands.message.startswith(_step(report)):
            return stands  # this operator may not have been there when the step began
    return Aspect(ConditionType.PROGRESSING, True, names.REASON_RUNNING)


def _step(report: RunReport) -> str:
    """With what a message about the step begins."""
    return f"step {report.step} "


def _degraded(observed: Observed, course: Course, report: RunReport | None) -> Aspect:
    stands = _standing(observed, ConditionType.DEGRADED)
    if course.phase is Phase.RUNNING and report is None and stands is not None:
        return stands
    if report is not None and report.reason == names.REASON_STORAGE_UNAVAILABLE:
        return Aspect(ConditionType.DEGRADED, True, names.REASON_STORAGE_UNAVAILABLE, (report.message or "")[:1024])
    if report is not None and report.degraded:
        message = "policy servers and trainer disagree about the probabilities of sampled tokens"
        return Aspect(ConditionType.DEGRADED, True, names.REASON_PROBABILITIES_DIVERGE, message)
    if report is not None and report.skipped_in_row:
        message = f"the last {report.skipped_in_row} steps had no group to learn from"
        return Aspect(ConditionType.DEGRADED, True, names.REASON_STEPS_SKIPPED, message)
    return Aspect(ConditionType.DEGRADED, False, names.REASON_RUNNING)


def _standing(observed: Observed, kind: ConditionType) -> Aspect | None:
    """The condition as the status has it: an operator that has just started has asked no trainer yet."""
    for entry in observed.status.get("conditions") or ():
        if entry["type"] == kind:
            holds = None if entry["status"] == "Unknown" else entry["status"] == "True"
            return Aspect(kind, holds, entry["reason"], entry.get("message", ""))
    return None


def replicas_of(observed: Observed, kind: str, component: str) -> Replicas:
    """Ready and wanted replicas of the objects of one part."""
    ready = wanted = 0
    for item in observed.of_kind(kind):
        if (item["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT) == component:
            wanted += int((item.get("spec") or {}).get("replicas", 1))
            ready += int((item.get("status") or {}).get("readyReplicas", 0))
    return Replicas(ready, wanted)


def _ready(replicas: Replicas, what: str) -> str:
    return f"{replicas.ready} of {replicas.wanted} {what} ready"
