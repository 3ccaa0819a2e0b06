"""Where a run is and what it is to have next, from what is there. Pure, and the same from any order of events.

The only memory is in the cluster: the status (start, phase, Suspended condition) and annotations of trainer Jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from kitestring_api import names
from kitestring_api.v1alpha1.status import ConditionType, Phase
from kitestring_operator.acceptance import Refusal
from kitestring_operator.observed import Manifest, Observed
from kitestring_operator.pods import condition, is_live, parse_time, trouble
from kitestring_operator.trainer_job import (
    ENDED,
    MOST_DISRUPTIONS,
    OUTAGES,
    EndKind,
    Losses,
    TrainerEnd,
    TrainerJob,
    pods_of,
    trainer_jobs,
)

FIRST_RESTART_SECONDS: Final = 10.0
"""Wait before a trainer that ended is started again, doubled with each; none after the first that was taken away."""
LONGEST_RESTART_SECONDS: Final = 300.0
LOOK_AGAIN_SECONDS: Final = 15.0
"""For what no event tells of: a Secret that appears, a node that never answers again."""
TOLD_SECONDS: Final = 0.2
"""After which a status that could not be written yet, since statuses are written at a measured pace, is tried again."""

POD_BEARING: Final = frozenset({"Job", "StatefulSet", "Deployment"})
"""Kinds of which a run that holds no pod has none but ended trainer Jobs."""
_PHASES: Final[Mapping[str, Phase]] = {phase.value: phase for phase in Phase}
_HOLDING: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})
_WORKING: Final = frozenset({"Validating", "RollingOut", "Updating", "PushingWeights", "Finished", "Failed"})
"""Phases that a trainer reports once it has work."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What the queue says: whether the run may hold pods, and if not, why."""

    is_open: bool = True
    reason: str = names.REASON_ADMITTED
    message: str = "no queue is named"


@dataclass(frozen=True, slots=True)
class Course:
    """Where a run is, and which of its pods are to be there."""

    phase: Phase
    reason: str
    message: str
    trainer: TrainerJob | None
    """The newest trainer Job that is there."""
    losses: Losses
    trainer_number: int = 1
    """N of the trainer that is to run."""
    wants_parts: bool = False
    """Everything that a running run consists of is to be there."""
    may_start_trainer: bool = False
    """With `wants_parts`: also a new trainer. Otherwise it waits for its predecessor's pods, or for its turn."""
    stops_trainer_first: bool = False
    """Without `wants_parts`: the rest stays until the pods of trainer and rollouts are gone."""
    started_at: datetime | None = None
    completed_at: datetime | None = None
    end: TrainerEnd | None = None
    outage: TrainerEnd | None = None
    """The end of the last trainer that ended, if something that it needs was away."""
    look_again_seconds: float | None = None

    @property
    def restarts(self) -> int:
        """Trainers that ended for a cause that counts."""
        return self.losses.restarts

    @property
    def holds_back(self) -> bool:
        """Whether objects are left exactly as they are."""
        return self.phase in _HOLDING and not self.wants_parts


def course(observed: Observed, refusal: Refusal | None, gate: Gate) -> Course:
    """The course of a run. `refusal`: why it cannot be carried out; what runs already goes on all the same."""
    jobs = trainer_jobs(observed)
    newest = jobs[-1] if jobs else None
    end = None if newest is None else newest.end
    status = observed.status
    step = _steps_done(observed)
    losses = Losses(int(status.get("restarts") or 0), step=step) if newest is None else newest.losses(step)
    prior = _phase(status.get("phase"))
    started_at = parse_time(status.get("startTime")) or (observed.now if jobs else None)
    seen = Course(
        prior or Phase.PENDING,
        str(status.get("reason") or names.REASON_STARTING),
        str(status.get("message") or ""),
        newest,
        losses,
        started_at=started_at,
        end=end,
        outage=_outage(jobs),
    )
    if prior is not None and prior.is_final:
        done = parse_time(status.get("completionTime")) or observed.now
        return replace(seen, completed_at=done, stops_trainer_first=seen.reason == names.REASON_DEADLINE_EXCEEDED)
    final = _final(observed, seen, prior)
    if final is not None:
        return final
    if refusal is not None and started_at is None:
        again = LOOK_AGAIN_SECONDS if refusal.may_mend_itself else None
        return replace(
            seen, phase=Phase.PENDING, reason=refusal.reason, message=refusal.message, look_again_seconds=again
        )
    if observed.is_suspended or not gate.is_open:
        return _hindered(observed, _stopping(observed, seen, gate))
    if refusal is not None:
        return _holding_on(seen, prior, refusal)
    return _hindered(observed, _running(observed, seen, prior))


def _outage(jobs: Sequence[TrainerJob]) -> TrainerEnd | None:
    ended = [job.end for job in jobs if job.end is not None]
    return ended[-1] if ended and ended[-1].reason in OUTAGES else None


def _final(observed: Observed, seen: Course, prior: Phase | None) -> Course | None:
    """The end of the run, if it has come now."""
    end, spec = seen.end, observed.spec
    over = replace(seen, phase=Phase.FAILED, completed_at=observed.now)
    if end is not None:
        if end.kind is EndKind.SUCCEEDED:
            done = end.ended_at or observed.now
            return replace(over, phase=Phase.SUCCEEDED, reason=end.reason, message=end.message, completed_at=done)
        if end.kind is EndKind.FAILED:
            return replace(over, reason=end.reason, message=end.message)
        counts = seen.trainer is not None and seen.restarts > seen.trainer.before.restarts
        if spec is not None and counts and seen.restarts > spec.failure_policy.max_restarts:
            allowed = spec.failure_policy.max_restarts
            message = (
                f"the trainer was lost {seen.restarts} times, failurePolicy.maxRestarts is {allowed}; {end.message}"
            )
            if end.kind is EndKind.DISRUPTED:
                message += f"; {seen.losses.disruptions} such ends since the last new step: those over "
                message += f"{MOST_DISRUPTIONS} count"
            reason = end.reason if end.reason in OUTAGES else names.REASON_TOO_MANY_RESTARTS
            return replace(over, reason=reason, message=message)
    left = seconds_left(observed, prior)
    if left is not None and left <= 0 and spec is not None:
        message = f"the run took longer than activeDeadlineSeconds: {spec.active_deadline_seconds}"
        return replace(over, reason=names.REASON_DEADLINE_EXCEEDED, message=message, stops_trainer_first=True)
    return None


def seconds_left(observed: Observed, phase: Phase | None) -> float | None:
    """Until `activeDeadlineSeconds`, which count anew when a run is resumed; None: there is no deadline."""
    spec, since = observed.spec, parse_time(observed.status.get("startTime"))
    if spec is None or spec.active_deadline_seconds is None or since is None or phase not in _HOLDING:
        return None
    for entry in observed.status.get("conditions") or ():
        if entry["type"] == ConditionType.SUSPENDED and entry["status"] == "False":
            since = max(since, parse_time(entry["lastTransitionTime"]) or since)
    return (since + timedelta(seconds=spec.active_deadline_seconds) - observed.now).total_seconds()


def _stopping(observed: Observed, seen: Course, gate: Gate) -> Course:
    """Not to hold pods: by the user's wish, or because the queue does not admit it."""
    asked = observed.is_suspended
    reason = names.REASON_SUSPEND_REQUESTED if asked else gate.reason
    message = "spec.suspend is true" if asked else gate.message
    held = live_pods(observed)
    stopped = replace(seen, reason=reason, message=message, stops_trainer_first=True)
    if held or any(is_pod_bearing(item) for item in observed.objects):
        waits = f"; waiting for {len(held)} pods to end" if held else ""
        again = LOOK_AGAIN_SECONDS if held else None
        return replace(stopped, phase=Phase.SUSPENDING, message=message + waits, look_again_seconds=again)
    return replace(stopped, phase=Phase.SUSPENDED if asked else Phase.QUEUED)


def _holding_on(seen: Course, prior: Phase | None, refusal: Refusal) -> Course:
    """What runs goes on, but nothing new can be made: its pool is gone, or a change cannot be carried out."""
    lost = seen.end is not None or seen.trainer is None
    phase = Phase.RESTARTING if lost else prior if prior in _HOLDING else Phase.STARTING
    again = LOOK_AGAIN_SECONDS if refusal.may_mend_itself else None
    return replace(seen, phase=phase, reason=refusal.reason, message=refusal.message, look_again_seconds=again)


def _running(observed: Observed, seen: Course, prior: Phase | None) -> Course:
    trainer, end = seen.trainer, seen.end
    going = replace(seen, wants_parts=True)
    if trainer is not None and end is None and not trainer.is_deleted:
        again = trainer.seconds_to_give_up
        return _with_trainer(observed, replace(going, trainer_number=trainer.number, look_again_seconds=again), prior)
    number = 1 if trainer is None else trainer.number + 1
    is_going = trainer is not None and trainer.is_deleted and end is None
    if trainer is not None and is_going:
        number = trainer.number  # it leaves its name when it is gone
    wait = _seconds_to_restart(observed, seen)
    blocked = [pod for pod in pods_of(observed, names.COMPONENT_TRAINER) if is_live(pod, observed.now)]
    was_there = prior in _HOLDING
    phase = Phase.RESTARTING if was_there and (end is not None or prior is not Phase.STARTING) else Phase.STARTING
    lost = end.message if end is not None else "its Job was deleted" if phase is Phase.RESTARTING else ""
    message = "parts are being started" if phase is Phase.STARTING else f"the trainer was lost: {lost}"
    # Of a trainer that has said nothing yet the status is believed: it must say first that the last one was lost.
    is_told = prior is not Phase.RUNNING
    again = None if is_told else TOLD_SECONDS
    if wait > 0:
        message, again = f"{message}; it is started again in {wait:.0f} s", wait
    elif blocked:
        message, again = f"{message}; waiting for pod {blocked[0]['metadata']['name']} to end", LOOK_AGAIN_SECONDS
    return replace(
        going,
        phase=phase,
        reason=names.REASON_STARTING if phase is Phase.STARTING else _why_lost(seen),
        message=message,
        trainer_number=number,
        may_start_trainer=is_told and wait <= 0 and not blocked and not is_going,
        look_again_seconds=again,
    )


def _hindered(observed: Observed, way: Course) -> Course:
    """With what keeps a part from being made in place of what is waited for."""
    if observed.hindrance is None or way.phase in (Phase.RUNNING, Phase.SUSPENDING, Phase.SUSPENDED):
        return way
    return replace(way, message=observed.hindrance)


def _with_trainer(observed: Observed, going: Course, prior: Phase | None) -> Course:
    """A trainer Job is there and has not ended."""
    phase = Phase.RESTARTING if prior in (Phase.RESTARTING, Phase.RUNNING) else Phase.STARTING
    held = None if going.trainer is None else going.trainer.suspension
    if held is not None:
        return replace(going, phase=phase, reason=names.REASON_SUSPENDED_BY_OTHERS, message=held)
    reported = None if observed.trainer is None else observed.trainer.status.get("phase")
    if reported in _WORKING or (reported is None and prior is Phase.RUNNING):
        return replace(going, phase=Phase.RUNNING, reason=names.REASON_RUNNING, message=_activity(observed))
    reason, message = names.REASON_STARTING, "parts are being started"
    if phase is Phase.RESTARTING:
        reason, message = _why_lost(going), "the trainer is started again"
        if going.outage is not None:
            message += f"; what the last one said: {going.outage.message}"
    for pod in observed.of_kind("Pod"):
        found = trouble(pod) if is_live(pod, observed.now) else None
        if found is not None:
            return replace(going, phase=phase, reason=found.reason or reason, message=found.message)
    message = next(iter(observed.refused_pods.values()), message)
    return replace(going, phase=phase, reason=reason, message=message)


def _why_lost(way: Course) -> str:
    return names.REASON_TRAINER_LOST if way.outage is None else way.outage.reason


def _seconds_to_restart(observed: Observed, seen: Course) -> float:
    """Until the next trainer may be started: longer with each that ended, and none after the first disruption."""
    end = seen.end
    if end is None or end.ended_at is None:
        return 0.0
    before = seen.restarts if end.kind is EndKind.LOST else seen.losses.disruptions - 1
    if before <= 0:
        return 0.0
    wait = min(FIRST_RESTART_SECONDS * 2.0 ** min(before - 1, 16), LONGEST_RESTART_SECONDS)
    return (end.ended_at + timedelta(seconds=wait) - observed.now).total_seconds()


def _phase(word: object) -> Phase | None:
    """A phase of the status; None for one of another version's."""
    return _PHASES.get(word) if isinstance(word, str) else None


def _steps_done(observed: Observed) -> int:
    """The furthest step that anyone knows of; the status may be a moment behind the trainer."""
    told = None if observed.trainer is None else observed.trainer.status.get("made_step")
    return max(int(observed.status.get("step") or 0), int(told or 0))


def _activity(observed: Observed) -> str:
    if observed.trainer is None:
        return str(observed.status.get("message") or "")  # what it said before this operator was there
    said = observed.trainer.status
    words = {
        "Validating": "validating",
        "RollingOut": "rollouts run",
        "Updating": "the policy is updated",
        "PushingWeights": "policy servers get the new weights",
        "Finished": "the last results are written",
        "Failed": "the trainer ends",
    }
    return f"step {said.get('step')} of {said.get('steps')}: {words.get(str(said.get('phase')), 'going on')}"


def live_pods(observed: Observed, *components: str) -> list[Manifest]:
    """The pods of the run, or of some of its parts, that have not ended."""
    pods: Sequence[Manifest] = pods_of(observed, *components) if components else observed.of_kind("Pod")
    return [pod for pod in pods if is_live(pod, observed.now)]


def is_pod_bearing(item: Manifest) -> bool:
    """Whether an object makes pods; a trainer Job that has ended does not."""
    if item["kind"] not in POD_BEARING:
        return False
    return not _is_ended_trainer(item)


def _is_ended_trainer(item: Manifest) -> bool:
    labels = item["metadata"].get("labels") or {}
    if item["kind"] != "Job" or labels.get(names.LABEL_COMPONENT) != names.COMPONENT_TRAINER:
        return False
    return any(condition(item, kind) == "True" for kind in ENDED)
