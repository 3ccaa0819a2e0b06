"""What of a run goes when it is not to hold pods, or not so many, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from kitestring_api import names
from kitestring_operator.lifecycle import Course, is_pod_bearing, live_pods
from kitestring_operator.observed import Manifest, ObjectRef, Observed
from kitestring_operator.trainer_job import trainer_jobs

KEPT_TRAINERS: Final = 3
"""Trainer Jobs that have ended and are kept, for their logs."""
_FIRST: Final = (names.COMPONENT_TRAINER, names.COMPONENT_ROLLOUT)
_PRUNED: Final = ("ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet", "Deployment")
"""Kinds of which a running run has exactly what is wanted."""


def stopped(observed: Observed, course: Course) -> list[ObjectRef]:
    """What goes now of a run that is to hold no pod: with `stops_trainer_first` in two turns."""
    holders = [item for item in observed.objects if is_pod_bearing(item)]
    if course.stops_trainer_first:
        first = [item for item in holders if _component(item) in _FIRST]
        if first or live_pods(observed, *_FIRST):
            holders = first
    rollouts = [item for item in holders if is_rollout_job(item)]
    others = [ObjectRef.of(item) for item in holders if not is_rollout_job(item) and not _is_going(item)]
    known = {job["metadata"]["name"] for job in observed.of_kind("Job")}
    return others + with_secret(observed, rollouts) + secrets_alone(observed, known)


def superfluous(observed: Observed, wanted: Iterable[Manifest]) -> list[ObjectRef]:
    """What a running run no longer needs: objects that are not wanted, and the oldest trainers that have ended.

    A trainer whose node never answered again is not kept once there is another: it has no log, and its Job no end.
    """
    names_of = {(item["kind"], item["metadata"]["name"]) for item in wanted}
    found = [
        ObjectRef.of(item)
        for kind in _PRUNED
        for item in observed.of_kind(kind)
        if (kind, item["metadata"]["name"]) not in names_of and not _is_going(item)
    ]
    trainers = trainer_jobs(observed)
    ended = [job for job in trainers if job.end is not None]
    kept = [job for job in ended[-KEPT_TRAINERS:] if job.is_over or job is trainers[-1]]
    return found + [ObjectRef.of(job.job) for job in ended if job not in kept and not job.is_deleted]


def with_secret(observed: Observed, jobs: Collection[Manifest]) -> list[ObjectRef]:
    """The Jobs of rollouts, each with the Secret of its name."""
    if not jobs:
        return []
    names_of = {job["metadata"]["name"] for job in jobs}
    secrets = [item for item in observed.of_kind("Secret") if item["metadata"]["name"] in names_of]
    return [ObjectRef.of(item) for item in (*jobs, *secrets) if not _is_going(item)]


def secrets_alone(observed: Observed, jobs: Collection[str]) -> list[ObjectRef]:
    """Secrets of rollouts of which no Job has the name; `jobs` are the names of those that are there or wanted.

    They are left where a process ended between two requests, or someone deleted the Job.
    """
    return [
        ObjectRef.of(item)
        for item in observed.of_kind("Secret")
        if item["metadata"]["name"] not in jobs
        and names.LABEL_ROLLOUT in (item["metadata"].get("labels") or {})
        and not _is_going(item)
    ]


def is_rollout_job(item: Manifest) -> bool:
    """Whether it is the Job of a single rollout."""
    return item["kind"] == "Job" and names.LABEL_ROLLOUT in (item["metadata"].get("labels") or {})


def _component(item: Manifest) -> str | None:
    component: str | None = (item["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT)
    return component


def _is_going(item: Manifest) -> bool:
    return "deletionTimestamp" in item["metadata"]
