"""The one decision of the operator: from what is observed of a run to what is to be. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_api.v1alpha1.status import Phase
from kitestring_operator import identity, queueing, rollouts
from kitestring_operator.acceptance import Refusal, refusal
from kitestring_operator.blueprint import is_trainer_job, with_trainer
from kitestring_operator.kept_configs import with_kept_configs
from kitestring_operator.lifecycle import Course, course, seconds_left
from kitestring_operator.observed import (
    Desired,
    GeneratedSecret,
    LostRollout,
    Manifest,
    ObjectRef,
    Observed,
    RunContext,
    WantedRollout,
)
from kitestring_operator.parts import configs, credentials, pod
from kitestring_operator.parts.storage import storage_target
from kitestring_operator.pods import controller_uid, parse_time
from kitestring_operator.rollouts.rollout_jobs import agent_requests, beyond, has_ended
from kitestring_operator.rollouts.rollout_jobs import refusal as unfit
from kitestring_operator.run_report import RunReport
from kitestring_operator.settings import Settings
from kitestring_operator.started_with import StartedWith, started_with
from kitestring_operator.status import classes_of, events_of, status_of
from kitestring_operator.stopping import is_rollout_job, secrets_alone, stopped, superfluous, with_secret
from kitestring_operator.trainer_job import Losses


def desired(settings: Settings, observed: Observed) -> Desired:
    """What is to be of a run. From the same observations always the same."""
    if observed.is_deleted or is_of_others(observed):
        return Desired(status=observed.status)
    stands, open_gate = refusal(observed), queueing.gate(observed)
    way = course(observed, stands, open_gate)
    made = _Made()
    if stands is None and not way.phase.is_final:
        try:
            made = _made(settings, observed, way)
        except UserMistakeError as error:
            stands = Refusal(names.REASON_INVALID_SPEC, str(error))
            way = course(observed, stands, open_gate)
    report = None if observed.trainer is None else RunReport.model_validate(observed.trainer.status)
    status = status_of(observed, way, stands, open_gate, report)
    quota, classes = queueing.word_to_kueue(observed, way), classes_of(way, report)
    if not way.wants_parts:
        deletions = [] if way.holds_back else stopped(observed, way)
        # what the API server refuses is tried again: with a Workload made anew it would displace others each time
        is_refused = stands is not None and not stands.may_mend_itself and observed.refused is None
        if observed.workload is not None and queueing.is_over(observed, way, is_refused=is_refused):
            deletions.append(ObjectRef.of(observed.workload))
        return Desired(
            status=status,
            objects=made.workloads if way.phase in (Phase.QUEUED, Phase.SUSPENDING) else (),
            deletions=tuple(deletions + _expired(observed, way)),
            events=events_of(observed, status),
            quota=quota,
            classes=classes,
            requeue_seconds=_look_again(observed, way),
        )
    return Desired(
        status=status,
        rehearsed=made.rehearsed,
        sample=made.sample,
        objects=(*made.workloads, *made.objects),
        quota=quota,
        generated_secrets=made.generated_secrets,
        deletions=(*superfluous(observed, made.objects), *made.deletions),
        events=events_of(observed, status),
        live=made.live if report is not None else None,
        lost=made.lost,
        classes=classes,
        requeue_seconds=_look_again(observed, way),
    )


def is_of_others(observed: Observed) -> bool:
    """Whether another controller carries the run out."""
    return bool((observed.run.get("spec") or {}).get("managedBy"))


@dataclass(frozen=True, slots=True)
class _Made:
    """What a running run consists of."""

    rehearsed: tuple[Manifest, ...] = ()
    """What is made only when the run has started, and would be refused too late."""
    sample: Manifest | None = None
    objects: tuple[Manifest, ...] = ()
    generated_secrets: tuple[GeneratedSecret, ...] = ()
    workloads: tuple[Manifest, ...] = ()
    """Kueue's Workload, where it is to be made or may be changed."""
    deletions: tuple[ObjectRef, ...] = ()
    live: dict[str, Any] | None = None
    lost: tuple[LostRollout, ...] = ()


def run_context(settings: Settings, observed: Observed, way: Course) -> RunContext:
    """Raises UserMistakeError where the run has no storage."""
    assert observed.spec is not None and observed.pool is not None, "a run that is accepted has both"
    kept = started_with(observed) if way.started_at is not None else StartedWith()
    return RunContext(
        settings=settings,
        name=observed.name,
        namespace=observed.namespace,
        uid=observed.uid,
        run_id=identity.run_id(observed.name, observed.uid),
        spec=observed.spec,
        pool=observed.pool.spec,
        pool_name=observed.pool.metadata.name,
        trainer_number=way.trainer_number,
        storage=storage_target(settings, observed.name, observed.uid, observed.spec, kept.place),
        checkpoints=kept.checkpoints(observed.spec) or observed.checkpoints or {},
        is_first_start=_before(way) == Losses(),
    )


def _made(settings: Settings, observed: Observed, way: Course) -> _Made:
    context = run_context(settings, observed, way)
    context = queueing.within_admission(context, observed.workload)
    plan = with_trainer(context, _stamps(way))
    objects = list(plan)
    workloads = _workloads(context, observed, objects)
    if not way.may_start_trainer:
        objects = [item for item in objects if not is_trainer_job(item) or _is_there(observed, item)]
    apart = _Apart()
    rehearsed: tuple[Manifest, ...] = ()
    sample: Manifest | None = None
    pod_sets = {} if observed.workload is None else queueing.pod_set_names(plan)
    if context.pool.isolation == "Job":
        apart = _rollout_jobs(context, observed)
        rehearsed = (rollouts.sample_job(context),) if way.started_at is None else ()
        if apart.objects:
            sample = queueing.placed(rollouts.sample_job(context), pod_sets, observed)
    made = (queueing.placed(item, pod_sets, observed) for item in (*objects, *apart.objects))
    untouched = {id(item) for item in plan}
    hashed = [item if id(item) in untouched else identity.with_spec_hash(item) for item in made]
    return _Made(
        rehearsed=rehearsed,
        sample=sample,
        objects=with_kept_configs(hashed, observed),
        workloads=workloads,
        generated_secrets=(credentials.generated_secret(observed.name),),
        deletions=tuple(apart.deletions),
        live=_live(context),
        lost=tuple(apart.lost),
    )


def _workloads(context: RunContext, observed: Observed, objects: list[Manifest]) -> tuple[Manifest, ...]:
    if observed.queue_name is None or not queueing.may_change(observed.workload):
        return ()
    if context.pool.isolation == "Job":
        sample = rollouts.sample_job(context)
        objects = [*objects, sample | {"spec": sample["spec"] | {"parallelism": context.pool.replicas}}]
    return (identity.with_spec_hash(queueing.workload_of(context, objects, observed.priority)),)


def _stamps(way: Course) -> tuple[tuple[str, str], ...]:
    """A trainer Job says which one it is and what went before, so that no memory is needed."""
    before = _before(way)
    return (
        (names.ANNOTATION_TRAINER_NUMBER, str(way.trainer_number)),
        (names.ANNOTATION_RESTARTS, str(before.restarts)),
        (names.ANNOTATION_DISRUPTIONS, str(before.disruptions)),
        (names.ANNOTATION_STEP, str(before.step)),
    )


def _before(way: Course) -> Losses:
    """What went before the trainer that runs, or is to run."""
    return way.losses if way.trainer is None or way.end is not None else way.trainer.before


def _is_there(observed: Observed, item: Manifest) -> bool:
    name = item["metadata"]["name"]
    return any(job["metadata"]["name"] == name for job in observed.of_kind("Job"))


# --- Rollouts with a Job of their own -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Apart:
    objects: tuple[Manifest, ...] = ()
    deletions: tuple[ObjectRef, ...] = ()
    lost: tuple[LostRollout, ...] = ()


def _rollout_jobs(context: RunContext, observed: Observed) -> _Apart:
    """Jobs that have ended go, once the queue knows; for the rollouts that wait, new ones up to `replicas` at once."""
    pods: defaultdict[str | None, list[Manifest]] = defaultdict(list)
    for item in observed.of_kind("Pod"):
        pods[controller_uid(item)].append(item)
    over: list[Manifest] = []
    going: list[Manifest] = []
    lost: list[LostRollout] = []
    known: set[str] = set()
    for job in observed.of_kind("Job"):
        known.add(job["metadata"]["name"])
        if not is_rollout_job(job):
            continue
        end = rollouts.outcome(job, pods[job["metadata"]["uid"]], observed.now)
        if end is not None:
            lost.append(end)
        (over if end is not None or has_ended(job) else going).append(job)
    waiting = {identity.rollout_job_name(context.name, entry.rollout, entry.number): entry for entry in observed.wanted}
    new = [entry for name, entry in waiting.items() if name not in known]
    wanted, refused = _to_start(context, observed, new, len(going))
    objects = [item for entry in wanted for item in rollouts.rollout_job(context, entry)]
    gone = (*with_secret(observed, over), *secrets_alone(observed, known.union(waiting)))
    return _Apart(tuple(objects), gone, (*lost, *refused))


def _to_start(
    context: RunContext, observed: Observed, wanted: Iterable[WantedRollout], going: int
) -> tuple[list[WantedRollout], list[LostRollout]]:
    """Of those that wait and have no Job: who gets one, beside so many that run, and whose task is refused."""
    admitted: dict[str, str] | None = None
    start: list[WantedRollout] = []
    refused: list[LostRollout] = []
    for entry in wanted:
        why = observed.unfit.get((entry.rollout, entry.number)) or unfit(context.pool, entry)
        if why is None and observed.queue_name is not None and entry.resources is not None:
            admitted = admitted or agent_requests(rollouts.sample_job(context))
            why = beyond(admitted, entry)
        if why is not None:
            refused.append(LostRollout(entry.rollout, entry.number, names.CLASS_INVALID_TASK, why))
        elif going + len(start) < context.pool.replicas:
            start.append(entry)
    return start, refused


# --- What else follows --------------------------------------------------------------------------------------------


def _live(context: RunContext) -> dict[str, Any]:
    """Body of PUT /run/v1/live. A run without a model of its own has no policy servers to speak of."""
    gateway = identity.gateway_name(context.name)
    servers = [
        url for policy in context.spec.trained_policies for url in configs.policy_server_urls(context, policy.name)
    ]
    return {
        "steps": context.spec.steps,
        "gateways": pod.pod_urls(context, gateway, context.spec.gateway.replicas, names.PORT_GATEWAY_ADMIN),
    } | ({"policy_servers": servers} if servers else {})


def _ttl_left(observed: Observed, way: Course) -> float | None:
    """Seconds until the resource itself goes; None: never, or not yet known."""
    completed = parse_time(observed.status.get("completionTime"))
    if observed.spec is None or not way.phase.is_final or completed is None:
        return None
    seconds = observed.spec.ttl_seconds_after_finished
    return None if seconds is None else (completed + timedelta(seconds=seconds) - observed.now).total_seconds()


def _expired(observed: Observed, way: Course) -> list[ObjectRef]:
    left = _ttl_left(observed, way)
    return [ObjectRef.of(observed.run)] if left is not None and left <= 0 else []


def _look_again(observed: Observed, way: Course) -> float | None:
    """When something falls due that no event tells of."""
    times = (way.look_again_seconds, seconds_left(observed, way.phase), _ttl_left(observed, way))
    known = [max(time, 0.0) for time in times if time is not None]
    return min(known) if known else None
