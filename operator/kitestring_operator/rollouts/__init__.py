"""The pool's side of a run: the pods that run agents, what they may reach, how their ends are read."""

from __future__ import annotations

from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.rollouts.network import rollout_policy
from kitestring_operator.rollouts.outcome import outcome
from kitestring_operator.rollouts.pool_status import is_under_way, pool_status
from kitestring_operator.rollouts.rollout_jobs import rollout_job, sample_job
from kitestring_operator.rollouts.scorer import scorer_objects
from kitestring_operator.rollouts.workers import workers

__all__ = ["is_under_way", "outcome", "pool_status", "rollout_job", "sample_job", "worker_objects"]


def worker_objects(context: RunContext) -> list[Manifest]:
    """What a running run has of its pool all the time, the walls first: its policy, its scorer, and the workers of
    isolation Worker. Raises OverlayRefusedError, also for a pool of which no Job of a rollout could be made."""
    kept = [rollout_policy(context), *scorer_objects(context)]
    if context.pool.isolation == "Job":
        sample_job(context)
        return kept
    return [*kept, workers(context)]
