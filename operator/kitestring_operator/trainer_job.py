"""The trainer Jobs of a run: which is the newest, and how it ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kitestring_api import names
from kitestring_operator.observed import Manifest, Objects, Observed
from kitestring_operator.pods import (
    GIVE_UP_AFTER,
    ContainerEnd,
    condition,
    condition_entry,
    ends,
    is_live,
    is_owned_by,
    parse_time,
    termination_message,
)
from kitestring_operator.run_report import Count, RolloutCounts, ValidationResult

CONTAINER: Final = "trainer"
"""The container whose termination message is the result of the run."""
_OWN: Final = frozenset({CONTAINER, "fetch"})
"""Containers whose exit codes have our meaning; a template may have brought others."""
MESSAGE_LENGTH: Final = 1024
MOST_DISRUPTIONS: Final = 10
"""In a row, without a new step. Each further one counts as a restart: the trainer itself may be what causes them."""

_WELL: Final = ("Complete", "SuccessCriteriaMet")
_BADLY: Final = ("Failed", "FailureTarget")
ENDED: Final = (*_WELL, *_BADLY)
"""Conditions of a Job that has ended, or is being ended by Kubernetes because its end is certain."""
_LATEST: Final = datetime.max.replace(tzinfo=UTC)
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_INDEX: Final = "batch.kubernetes.io/job-completion-index"

FAILURES: Final = frozenset(
    {
        names.REASON_INVALID_SPEC,
        names.REASON_NOT_SUPPORTED,
        names.REASON_REFERENCE_NOT_FOUND,
        names.REASON_SCORER_UNREACHABLE,
        names.REASON_STORAGE_UNAVAILABLE,
        names.REASON_PROBABILITIES_DIVERGE,
        names.REASON_STEPS_SKIPPED,
        names.REASON_INVALID_TASKS,
        names.REASON_ERROR,
    }
)
"""Reasons that a trainer may give for its failure; another word counts as REASON_ERROR."""

OUTAGES: Final = frozenset({names.REASON_SCORER_UNREACHABLE, names.REASON_STORAGE_UNAVAILABLE})
"""Those of them with which it asks to be started again: what it needs was away. A run whose restarts are used up by one
ends with that reason."""


class EndKind(StrEnum):
    """What an ended trainer means for its run."""

    SUCCEEDED = "succeeded"
    """All steps are done."""
    FAILED = "failed"
    """The run failed, and starting the trainer again does not help."""
    LOST = "lost"
    """It is to be started again, and this counts."""
    DISRUPTED = "disrupted"
    """The cluster took it away: it is to be started again, and this does not count, unless it happens over and over."""


class TrainerResult(BaseModel):
    """What the trainer left as its termination message, as far as it is what we expect."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    reason: str = names.REASON_ERROR
    message: str | None = None
    step: int | None = None
    steps: int | None = None
    checkpoint: str | None = None
    reward: float | None = None
    tokens: Count | None = None
    skipped_steps: Count | None = None
    rollouts: RolloutCounts | None = None
    """Totals of the run; None: it ended before it knew them."""
    validation: Annotated[tuple[ValidationResult, ...], Field(strict=False)] = ()


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a trainer Job ended."""

    kind: EndKind
    reason: str
    """One of names.REASON_*."""
    message: str
    ended_at: datetime | None = None
    """By the clock of Kubernetes: that of a node may go wrong by hours."""
    pod: str | None = None
    container: str | None = None
    result: TrainerResult | None = None


@dataclass(frozen=True, slots=True)
class Losses:
    """The trainers that a run has lost."""

    restarts: int = 0
    """For a cause that counts."""
    disruptions: int = 0
    """Taken away by the cluster since the last new step."""
    step: int = 0
    """The furthest step that was made."""


@dataclass(frozen=True, slots=True)
class TrainerJob:
    """A trainer Job of a run, with its pods."""

    job: Manifest
    pods: tuple[Manifest, ...]
    number: int
    before: Losses
    """What its annotations say of those before it."""
    now: datetime

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def is_deleted(self) -> bool:
        return "deletionTimestamp" in self.job["metadata"]

    @property
    def end(self) -> TrainerEnd | None:
        """How it ended; None while it goes on."""
        return _end(self.job, self.pods) or _given_up(self.pods, self.now)

    @property
    def is_over(self) -> bool:
        """Whether Kubernetes knows that it has ended: it does not of one whose node never answers again."""
        return has_ended(self.job)

    @property
    def seconds_to_give_up(self) -> float | None:
        """Until it may count as gone, unless it ends before; None: no pod is being deleted that may still be there."""
        times = [gone_at for gone_at in map(_gone_at, self.pods) if gone_at is not None and gone_at > self.now]
        return (max(times) - self.now).total_seconds() if times else None

    @property
    def suspension(self) -> str | None:
        """That something suspended the Job, and what its user can do; None: nothing did. The operator never does."""
        if not (self.job.get("spec") or {}).get("suspend") or self.end is not None:
            return None
        metadata = self.job["metadata"]
        queue = (metadata.get("labels") or {}).get(_QUEUE)
        if queue is None:
            why = (
                "; find what suspends Jobs here (Kueue does with manageJobsWithoutQueueName) and have it leave this "
                "namespace out"
            )
        else:
            why = (
                f": Kueue has put it into queue {queue}, as it does with all that names no queue where there is a "
                f"LocalQueue {queue}; give that queue another name"
            )
        return (
            f"Job {metadata['name']} of the trainer is suspended, and not by this operator{why}, then set spec.suspend "
            "of the run to true and to false again"
        )

    def losses(self, step: int) -> Losses:
        """Those of the run, this one included, which has brought it to `step`."""
        end = self.end
        restarts, disruptions = self.before.restarts, self.before.disruptions if step <= self.before.step else 0
        if end is not None and end.kind is EndKind.DISRUPTED:
            disruptions += 1
            restarts += disruptions > MOST_DISRUPTIONS
        elif end is not None and end.kind is EndKind.LOST:
            restarts += 1
        return Losses(restarts, disruptions, max(step, self.before.step))


def trainer_jobs(observed: Observed) -> tuple[TrainerJob, ...]:
    """All trainer Jobs of the run, the newest last."""
    pods = pods_of(observed, names.COMPONENT_TRAINER)
    jobs = []
    for job in observed.of_part("Job", names.COMPONENT_TRAINER):
        metadata = job["metadata"]
        annotations = metadata.get("annotations") or {}
        own = tuple(pod for pod in pods if is_owned_by(pod, metadata["uid"]))
        stamps = (names.ANNOTATION_RESTARTS, names.ANNOTATION_DISRUPTIONS, names.ANNOTATION_STEP)
        before = Losses(*(_count(annotations.get(stamp), 0) for stamp in stamps))
        jobs.append(TrainerJob(job, own, number_of(job), before, observed.now))
    return tuple(sorted(jobs, key=lambda job: job.number))


def newest_trainer(objects: Objects) -> Manifest | None:
    """The newest trainer Job among the objects of a run."""
    return max(objects.of_part("Job", names.COMPONENT_TRAINER), key=number_of, default=None)


def number_of(job: Manifest) -> int:
    """N of RUN-trainer-N."""
    return _count((job["metadata"].get("annotations") or {}).get(names.ANNOTATION_TRAINER_NUMBER), 1)


def has_ended(job: Manifest) -> bool:
    """Whether Kubernetes says so."""
    return any(condition(job, kind) == "True" for kind in ENDED)


def is_active(job: Manifest) -> bool:
    """Whether the Job has a pod that has not ended, as far as Kubernetes knows."""
    return bool((job.get("status") or {}).get("active"))


def pods_of(observed: Observed, *components: str) -> tuple[Manifest, ...]:
    """The pods of some parts of the run."""
    return tuple(pod for component in components for pod in observed.of_part("Pod", component))


def parse_result(text: str) -> TrainerResult | None:
    """The termination message of a trainer, or None where it is something else."""
    try:
        result = TrainerResult.model_validate_json(text)
    except ValidationError:
        return None
    return result.model_copy(
        update={
            "reason": result.reason if result.reason in FAILURES else names.REASON_ERROR,
            "message": None if result.message is None else _readable(result.message),
            "checkpoint": None if result.checkpoint is None else _readable(result.checkpoint),
        }
    )


def _end(job: Manifest, pods: Sequence[Manifest]) -> TrainerEnd | None:
    if any(condition(job, kind) == "True" for kind in _WELL):
        result = _result(pods)
        done = "all steps are done" if result is None or result.message is None else result.message
        completed = parse_time((job.get("status") or {}).get("completionTime"))
        return TrainerEnd(EndKind.SUCCEEDED, names.REASON_COMPLETED, done, completed, result=result)
    failed = [condition_entry(job, kind) or {} for kind in _BADLY if condition(job, kind) == "True"]
    if not failed:
        return None
    # that it is certain comes first, that all of its pods have ended may come minutes later
    times = [time for time in (parse_time(entry.get("lastTransitionTime")) for entry in failed) if time is not None]
    return replace(_failure(pods), ended_at=min(times, default=None))


def _given_up(pods: Sequence[Manifest], now: datetime) -> TrainerEnd | None:
    """Of a node that is lost for good, its pods are deleted and do not end, and their Job waits for them for ever.

    One that lives on behind a broken network may do no harm: incarnations fence what it writes. Of several nodes
    none may be left: if the lost one has ended, the others notice and end by themselves; else they go on with it.
    """
    if any(is_live(pod, now) for pod in pods):
        return None
    for pod in sorted(pods, key=_index):
        gone_at = _gone_at(pod)
        if gone_at is not None:
            node = (pod.get("spec") or {}).get("nodeName")
            where = f"; its node {node} does not answer" if node else ""
            name = str(pod["metadata"]["name"])
            message = f"pod {name} was deleted and has not ended since{where}"
            return TrainerEnd(EndKind.DISRUPTED, names.REASON_TRAINER_LOST, message, gone_at, pod=name)
    return None


def _gone_at(pod: Manifest) -> datetime | None:
    """When a pod that is being deleted, and has not ended, counts as gone."""
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    deleted = parse_time(pod["metadata"].get("deletionTimestamp"))
    return None if deleted is None else deleted + GIVE_UP_AFTER


def _failure(pods: Sequence[Manifest]) -> TrainerEnd:
    """Which of the pods' ends decides: a verdict of the trainer itself, then the cluster's doing, then the first."""
    found = [(pod, end) for pod in sorted(pods, key=_index) for end in ends(pod)]
    own = [(pod, end) for pod, end in found if end.container in _OWN]
    for pod, end in own:
        if end.exit_code in (names.EXIT_USER, names.EXIT_RUN_FAILED):
            result = parse_result(end.message)
            reason = names.REASON_ERROR if result is None else result.reason
            said = None if result is None else result.message
            failed = _of_container(EndKind.FAILED, reason, said or _described(pod, end), pod, end)
            return replace(failed, result=result)
    for pod in pods:
        if condition(pod, "DisruptionTarget") == "True":
            why = str((condition_entry(pod, "DisruptionTarget") or {}).get("message", ""))
            message = _readable(f"pod {pod['metadata']['name']} was taken away: {why}")
            name = str(pod["metadata"]["name"])
            return TrainerEnd(EndKind.DISRUPTED, names.REASON_TRAINER_LOST, message, pod=name)
    if found:
        pod, end = min(own or found, key=_first_by_itself)
        if end.container in _OWN and end.exit_code == names.EXIT_STOPPED:
            message = f"pod {pod['metadata']['name']} was told to stop"
            return _of_container(EndKind.DISRUPTED, names.REASON_TRAINER_LOST, message, pod, end)
        return _lost(pod, end)
    for pod in pods:
        status = pod.get("status") or {}
        if status.get("phase") == "Failed":
            name = str(pod["metadata"]["name"])
            message = _readable(f"pod {name} was refused: {status.get('reason')}: {status.get('message')}")
            return TrainerEnd(EndKind.LOST, names.REASON_TRAINER_LOST, message, pod=name)
    # Nothing is left of it, so someone or something removed its pod: a trainer that ends by itself leaves one.
    return TrainerEnd(EndKind.DISRUPTED, names.REASON_TRAINER_LOST, "its pod was removed")


def _lost(pod: Manifest, end: ContainerEnd) -> TrainerEnd:
    """With what the trainer says was away, if it does."""
    result = parse_result(end.message) if end.container in _OWN and end.exit_code == names.EXIT_FAILED else None
    if result is not None and result.reason in OUTAGES:
        return _of_container(EndKind.LOST, result.reason, result.message or _described(pod, end), pod, end)
    return _of_container(EndKind.LOST, names.REASON_TRAINER_LOST, _described(pod, end), pod, end)


def _first_by_itself(item: tuple[Manifest, ContainerEnd]) -> tuple[datetime, bool]:
    """When one machine's trainer ends, Kubernetes tells the others to stop, maybe in the same second: they did not end
    first."""
    _, end = item
    return end.finished_at or _LATEST, end.exit_code == names.EXIT_STOPPED


def _of_container(kind: EndKind, reason: str, message: str, pod: Manifest, end: ContainerEnd) -> TrainerEnd:
    return TrainerEnd(kind, reason, message, pod=str(pod["metadata"]["name"]), container=end.container)


def _described(pod: Manifest, end: ContainerEnd) -> str:
    why = f" ({end.reason})" if end.reason not in ("", "Error") else ""
    return f"container {end.container} of pod {pod['metadata']['name']} ended with code {end.exit_code}{why}"


def _result(pods: Iterable[Manifest]) -> TrainerResult | None:
    for pod in sorted(pods, key=_index):
        result = parse_result(termination_message(pod, CONTAINER))
        if result is not None:
            return result
    return None


def _index(pod: Manifest) -> int:
    metadata = pod["metadata"]
    found = (metadata.get("labels") or {}).get(_INDEX) or (metadata.get("annotations") or {}).get(_INDEX)
    return _count(found, 0)


def _count(text: object, default: int) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else default


def _readable(text: str) -> str:
    """One line of printable characters and moderate length."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())[:MESSAGE_LENGTH]
