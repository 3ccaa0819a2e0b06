"""A plan from its first lease to its commit, or what an earlier incarnation left of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kitestring_rollout.protocol.run_status import ValidationResult
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.incarnations import Incarnation
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.outcome import committed_rollouts
from kitestring_trainer.plan import StepPlan
from kitestring_trainer.queue.proofs import Proof
from kitestring_trainer.queue.rollouts import QueueRules, Restored, RolloutResult
from kitestring_trainer.queue.thread import QueueThread
from kitestring_trainer.restoring import Archive, recommitted, remains
from kitestring_trainer.tasks import TaskSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """What the policy servers serve. `version` is None before a push; `accepted` are the policy versions that are the
    same weights, None: whatever is served."""

    version: str | None
    accepted: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class EndedPlan:
    """Every rollout of a plan has ended. `redone`: the commit is one that an earlier incarnation wrote. `replaces`: a
    commit of weights that are no more."""

    commit: StepCommit
    results: Sequence[RolloutResult]
    redone: bool = False
    replaces: StepCommit | None = None


class PlanRunner:
    """Runs plans in the queue; blocks the calling thread meanwhile. Several threads may run one each."""

    def __init__(
        self, rules: QueueRules, ledger: Ledger, queue: QueueThread, archive: Archive, history: Sequence[Incarnation]
    ) -> None:
        self._rules = rules
        self._ledger = ledger
        self._queue = queue
        self._archive = archive
        self._history = history

    def run(self, plan: StepPlan, tasks: TaskSet, policy: ServedPolicy, min_group_size: int) -> EndedPlan:
        """Write the plan down, then have its rollouts run. One that was begun before is taken up where it was left:

        - committed from the weights that are served now: its rollouts are those of the commit;
        - not committed: what ended, sampled from these weights, counts; anything else is run again.
        """
        before = self._ledger.plan(plan.mode, plan.step) if len(self._history) > 1 else None
        if before is None:
            self._ledger.put_plan(plan)
            return self._new(plan, tasks, policy, min_group_size)
        plan, written = before
        old = self._ledger.commit(plan.mode, plan.step)
        planned = frozenset(plan.rollouts)
        proofs = list(self._archive.ended(written, planned.__contains__))
        if old is not None and (policy.accepted is None or old.policy_version in policy.accepted):
            restored = recommitted(old, proofs, self._rules.tries)
            return EndedPlan(old, self._lease(plan, tasks, policy, restored), redone=True)
        accepts = None if policy.accepted is None else policy.accepted.__contains__
        left = remains(plan, proofs, accepts, self._rules.tries)
        logger.info("%s: %d rollouts taken up, %d superseded", plan.name, len(left.restored), len(left.superseded))
        ended = self._new(plan, tasks, policy, min_group_size, left.restored)
        return EndedPlan(replace(ended.commit, superseded=left.superseded), ended.results, replaces=old)

    def commit(self, ended: EndedPlan, validation: ValidationResult | None = None) -> None:
        """Write down what became of the plan, unless that was done before."""
        if not ended.redone:
            self._ledger.put_commit(replace(ended.commit, validation=validation), replaces=ended.replaces)

    def proofs(self, commit: StepCommit) -> list[Proof]:
        """Of the committed attempts that storage still proves complete."""
        before = self._ledger.plan(commit.mode, commit.step)
        attempts = {rollout.attempt for rollout in commit.rollouts}
        planned = {rollout.rollout for rollout in commit.rollouts}
        found = () if before is None else self._archive.ended(before[1], planned.__contains__)
        return [proof for proof in found if proof.attempt in attempts]

    def _new(
        self,
        plan: StepPlan,
        tasks: TaskSet,
        policy: ServedPolicy,
        min_group_size: int,
        restored: Mapping[str, Restored] | None = None,
    ) -> EndedPlan:
        results = self._lease(plan, tasks, policy, restored)
        commit = StepCommit(
            run=self._rules.run,
            mode=plan.mode,
            step=plan.step,
            incarnation=self._history[-1].number,
            policy_version=policy.version,
            unix_time=time.time(),
            rollouts=committed_rollouts(results, min_group_size),
        )
        return EndedPlan(commit, results)

    def _lease(
        self, plan: StepPlan, tasks: TaskSet, policy: ServedPolicy, restored: Mapping[str, Restored] | None
    ) -> Sequence[RolloutResult]:
        accepts = None if policy.accepted is None else policy.accepted.__contains__
        return self._queue.call(self._queue.queue.run_plan(plan, tasks, accepted=accepts, restored=restored))
