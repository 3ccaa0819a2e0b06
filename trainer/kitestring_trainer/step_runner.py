"""The run's steps: plan, rollouts, commit, batch; then new weights, validation, checkpoints, figures.

The step runner is the `StepSource` that a learner pulls from. Its methods run in the learner's threads, one at a time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kitestring_api.names import MODE_TRAIN, MODE_VALIDATION_SAMPLED, REASON_STEPS_SKIPPED
from kitestring_rollout.protocol.run_status import ValidationResult
from kitestring_trainer.agreement import BOUNDS, AgreementWatch
from kitestring_trainer.checkpoints import Checkpoints, export_due
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.goal import StepGoal
from kitestring_trainer.incarnations import Incarnation, policy_version, same_weights
from kitestring_trainer.learner import PushedWeights, StepBatch, UpdateMetrics
from kitestring_trainer.learners import weights_dtype
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.metrics import (
    MetricsFile,
    rollout_metrics,
    sample_metrics,
    update_metrics,
    validation_metrics,
)
from kitestring_trainer.outcome import commonest_reason
from kitestring_trainer.plan import plan_training_step, plan_validation
from kitestring_trainer.plan_runner import PlanRunner, ServedPolicy
from kitestring_trainer.queue.rollouts import RolloutResult
from kitestring_trainer.queue.thread import QueueThread
from kitestring_trainer.restoring import Archive
from kitestring_trainer.samples.batches import SampleRules, Samples, ScoredRollout, make_samples
from kitestring_trainer.samples.rows import RowLimits
from kitestring_trainer.samples.transitions import transitions
from kitestring_trainer.status import StatusBoard
from kitestring_trainer.tasks import TaskSet
from kitestring_trainer.thread import in_thread
from kitestring_trainer.validation import ValidationMode, validation_due, validation_modes, validation_result
from kitestring_trainer.weights import PolicyServers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the step runner works with."""

    ledger: Ledger
    queue: QueueThread
    servers: PolicyServers | None
    """None: weights are never pushed (backend collect)."""
    archive: Archive
    board: StatusBoard
    metrics: MetricsFile
    checkpoints: Checkpoints
    goal: StepGoal
    train_tasks: TaskSet
    validation_tasks: TaskSet | None
    state_saved: Callable[[Path, int], None]
    """What happens with a resumable state besides lying in its folder."""
    await_servers: Callable[[], None]
    """Return when the policy servers serve; before that no rollout makes sense."""
    history: Sequence[Incarnation]
    """All starts of the run, this one last."""


@dataclass(slots=True)
class Totals:
    """Of the whole run, for status and result."""

    classes: dict[str, int] = field(default_factory=dict)
    excluded: int = 0
    superseded: int = 0
    skipped_steps: int = 0
    tokens: int = 0
    validation: list[ValidationResult] = field(default_factory=list)


@dataclass(slots=True)
class _Clock:
    """Wall seconds of the phases of the step in progress."""

    started: float
    phase_started: float
    seconds: dict[str, float] = field(default_factory=dict)

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.phase_started
        self.phase_started = now


class StepRunner:
    """Implements `StepSource` for one incarnation of a run."""

    def __init__(self, config: TrainerConfig, parts: Parts) -> None:
        self._spec = config.spec
        self._parts = parts
        self._plans = PlanRunner(config.rules, parts.ledger, parts.queue, parts.archive, parts.history)
        self._incarnation = parts.history[-1]
        self._version: str | None = None
        self._accepted: frozenset[str] | None = None
        """Policy versions that are the current weights; None: whatever is served."""
        self._weights: PushedWeights | None = None
        self._agreement = AgreementWatch(BOUNDS[weights_dtype(config)])
        self._early: Future[None] | None = None
        self._skipped_in_row = 0
        self._clock = _Clock(time.monotonic(), time.monotonic())
        self._line: dict[str, Any] = {}
        self._first_began: float | None = None
        self.made_step = self._incarnation.resumed_step
        """The last step whose updates are made and served."""
        self.totals = Totals()

    # --- the way in ---

    def begin(self) -> None:
        """Take up what earlier incarnations left, and start what needs no weights of ours. Before the learner runs."""
        self._recall()
        start = self._incarnation.resumed_step
        self._parts.board.update(
            incarnation=self._incarnation.number,
            step=start,
            made_step=start,
            checkpoint=self._parts.checkpoints.latest,
        )
        if self._parts.servers is None:
            self._parts.await_servers()
            self._catch_up(start)
        elif len(self._parts.history) == 1 and validation_due(0, self.steps, self._spec.validation):
            # The policy servers serve the initial model: this needs no learner, whose start takes long.
            self._early = in_thread(self._validate_early, "validation")

    def _validate_early(self) -> None:
        self._parts.await_servers()
        self._validate_between(0)

    def _recall(self) -> None:
        """Totals of the steps that this incarnation goes on from."""
        last = self._incarnation.resumed_step
        if not last and len(self._parts.history) == 1:
            return
        for commit in self._parts.ledger.commits(MODE_TRAIN):
            if commit.step <= last:
                self._count(commit)
                self._parts.queue.queue.retried += sum(max(0, rollout.tries - 1) for rollout in commit.rollouts)
                self._skipped_in_row = 0 if commit.counted else self._skipped_in_row + 1
                self.totals.skipped_steps += not commit.counted
        self.totals.tokens = self._parts.metrics.tokens()
        for mode, _ in validation_modes(self._spec.validation):
            for commit in self._parts.ledger.commits(mode):
                if self._still_true(commit) and commit.validation is not None:
                    self.totals.validation.append(commit.validation)
        self.totals.validation.sort(key=lambda result: (result.step, result.mode))
        self._publish()

    def _still_true(self, validated: StepCommit) -> bool:
        """Whether a validation was of weights that this incarnation goes on from, or of their predecessors."""
        last = self._incarnation.resumed_step
        if validated.step != last or last == 0:
            return validated.step <= last
        return self._parts.servers is None or validated.policy_version in same_weights(self._parts.history)

    def _catch_up(self, step: int) -> None:
        """What an earlier incarnation should have done after `step` and did not come to."""
        commit = self._parts.ledger.commit(MODE_TRAIN, step) if step else None
        if commit is not None and not self._parts.metrics.has_step(step):
            figures = rollout_metrics(commit, self._plans.proofs(commit))
            self._parts.metrics.append({"step": step, "skipped": not commit.counted, **figures})
            self.totals.tokens += figures["prompt_tokens"] + figures["completion_tokens"]
            self._publish()
        if validation_due(step, self.steps, self._spec.validation):
            self._validate_between(step)
        if step not in {exported.step for exported in self._parts.checkpoints.index.exported}:
            self._export(step, self.steps, degraded=False)

    # --- StepSource ---

    @property
    def steps(self) -> int:
        return self._parts.goal.steps

    def state_saved(self, step: int, folder: Path) -> None:
        self._parts.state_saved(folder, step)

    def step_batch(self, step: int) -> StepBatch:
        """Have the rollouts of `step` run, commit them, and make its batch."""
        self._join_early()
        self._clock = _Clock(time.monotonic(), time.monotonic())
        self._first_began = self._first_began or self._clock.started
        self._parts.board.update(phase="RollingOut", step=step, message=None)
        rollouts = self._spec.rollouts
        plan = plan_training_step(
            seed=self._spec.seed,
            step=step,
            n_tasks=len(self._parts.train_tasks),
            tasks_per_step=rollouts.tasks_per_step,
            group_size=rollouts.group_size,
        )
        ended = self._plans.run(plan, self._parts.train_tasks, self._policy(), rollouts.min_group_size)
        commit, results = ended.commit, ended.results
        self._plans.commit(ended)
        self._clock.lap("rollout")
        samples = make_samples(step, self._version or "", self._scored(commit, results), self._sample_rules())
        self._parts.ledger.put_samples(step, samples.records)
        self._count(commit)
        figures = rollout_metrics(commit, [result.proof for result in results if result.proof is not None])
        nothing = self._nothing_to_learn(commit, samples)
        self._line = {
            "step": step,
            "skipped": nothing is not None,
            "redone": ended.redone,
            **figures,
            **sample_metrics(samples),
        }
        self.totals.tokens += figures["prompt_tokens"] + figures["completion_tokens"]
        self._parts.board.update(phase="Updating", reward=figures["reward_mean"])
        self._skip_or_not(step, nothing)
        self._clock.lap("samples")
        return samples.batch

    def weights_ready(self, weights: PushedWeights) -> None:
        """Have every policy server serve the weights; at the start also catch up on what is due there."""
        assert self._parts.servers is not None
        self._clock.lap("update")
        first = self._version is None
        version = policy_version(self._incarnation.number, weights.version)
        self._parts.board.update(phase="Starting" if first else "PushingWeights")
        self._parts.queue.call_or_fail(self._parts.servers.push(weights.path, version))
        self._weights = weights
        self._version = version
        self._accepted = same_weights(self._parts.history) if first else frozenset([version])
        self._parts.board.update(policy_version=version)
        self._clock.lap("push")
        if first and self._early is None:
            self._catch_up(weights.version)

    def step_finished(self, step: int, metrics: UpdateMetrics) -> Mapping[str, float] | None:
        """Validate, export, and write the step's figures down."""
        self._clock.lap("push" if self._parts.servers is not None else "update")
        self.made_step = step
        last = self._parts.goal.settle(step)
        problem = self._agreement.note(step, metrics.agreement)
        degraded = self._agreement.degraded
        if problem is not None:
            logger.error("step %d: degraded: %s", step, problem)
        self._parts.board.update(
            degraded=degraded,
            message=problem,
            kl=metrics.agreement.kl_k3,
            correlation=metrics.agreement.correlation,
            made_step=step,
            last_step_unix=time.time(),
        )
        steps = step if last else self.steps
        results: list[ValidationResult] = []
        if validation_due(step, steps, self._spec.validation):
            results = self._validate(step)
            self._clock.lap("validation")
        self._export(step, steps, degraded=degraded)
        return self._write_down(step, metrics, results)

    # --- samples ---

    def _policy(self) -> ServedPolicy:
        return ServedPolicy(self._version, self._accepted)

    def _scored(self, commit: StepCommit, results: Sequence[RolloutResult]) -> list[ScoredRollout]:
        """Every rollout with a reward; groups that are too small are left out by the samples, with their reason."""
        agents = self._spec.algorithm.select.agents
        return [
            ScoredRollout(
                rollout=result.rollout,
                group=result.group,
                reward=result.final.ending.reward,
                transitions=tuple(transitions(result.proof.calls, agents=agents)),
            )
            for result in results
            if result.proof is not None and result.final.ending.reward is not None
        ]

    def _sample_rules(self) -> SampleRules:
        algorithm = self._spec.algorithm
        assert algorithm.advantage != "gae", "refused before the run begins"
        return SampleRules(
            advantage=algorithm.advantage,
            normalize_by_std=algorithm.normalize_by_std,
            min_group_size=self._spec.rollouts.min_group_size,
            limits=RowLimits(algorithm.max_row_tokens.prompt, algorithm.max_row_tokens.response),
            updates=algorithm.updates_per_step,
        )

    def _nothing_to_learn(self, commit: StepCommit, samples: Samples) -> str | None:
        """Why nothing can be learned from a step; None when something can."""
        if not commit.counted:
            return f"had no group to learn from; {commonest_reason(commit.rollouts)}"
        if self._parts.servers is None or samples.batch.rows:
            return None
        reasons = Counter(record.excluded for record in samples.records).most_common(1)
        return f"had no token to learn from; replies are excluded: {reasons[0][0] if reasons else 'there are none'}"

    def _skip_or_not(self, step: int, reason: str | None) -> None:
        self._skipped_in_row = 0 if reason is None else self._skipped_in_row + 1
        self.totals.skipped_steps += reason is not None
        self._publish()
        if reason is None:
            return
        logger.warning("step %d is skipped: it %s", step, reason)
        if self._skipped_in_row >= self._spec.failure_policy.max_skipped_steps:
            raise RunFailedError(REASON_STEPS_SKIPPED, f"{self._skipped_in_row} steps in a row: the last {reason}")

    # --- validation and checkpoints ---

    def _join_early(self) -> None:
        if self._early is not None:
            self._early.result()
            self._early = None

    def _validate_between(self, step: int) -> None:
        """Validate outside of a step; the results get a line of their own."""
        results = self._validate(step)
        if results:
            self._parts.metrics.append({"step": step, "unix_time": time.time(), **validation_metrics(results)})

    def _validate(self, step: int) -> list[ValidationResult]:
        """Run the validations of `step` that are not committed yet, greedy and sampled side by side."""
        tasks = self._parts.validation_tasks
        if tasks is None:
            return []
        self._parts.board.update(phase="Validating")
        known = {(result.step, result.mode) for result in self.totals.validation}
        pending = [
            in_thread(partial(self._validate_one, step, mode, repeats, tasks), "validation")
            for mode, repeats in validation_modes(self._spec.validation)
            if (step, mode) not in known
        ]
        results = [future.result() for future in pending]
        self.totals.validation.extend(results)
        self._publish()
        for result in results:
            logger.info("%s at step %d: reward %s of %d rollouts", result.mode, step, result.reward, result.rollouts)
        return results

    def _validate_one(self, step: int, mode: ValidationMode, repeats: int, tasks: TaskSet) -> ValidationResult:
        plan = plan_validation(mode=mode, step=step, n_tasks=len(tasks), repeats=repeats)
        ended = self._plans.run(plan, tasks, self._policy(), min_group_size=1)
        result = validation_result(mode, ended.commit, ended.results)
        self._plans.commit(ended, result)
        return result

    def _export(self, step: int, steps: int, *, degraded: bool) -> None:
        """Export the model when that is due, or when it is the best by validation so far."""
        if self._weights is None or self._version is None or step == 0:
            return
        reward = next(
            (r.reward for r in self.totals.validation if r.step == step and r.mode == MODE_VALIDATION_SAMPLED), None
        )
        checkpoints = self._parts.checkpoints
        best = not degraded and checkpoints.is_better(reward)
        if not best and not export_due(step, steps, self._spec.checkpoints.every):
            return
        checkpoints.export(step, self._weights.path, reward, version=self._version, is_best=best)
        self._parts.board.update(checkpoint=checkpoints.latest)
        self._clock.lap("export")

    # --- figures ---

    def _count(self, commit: StepCommit) -> None:
        totals = self.totals
        for klass, count in commit.classes.items():
            totals.classes[klass] = totals.classes.get(klass, 0) + count
        totals.excluded += len(commit.rollouts) - len(commit.counted)
        totals.superseded += len(commit.superseded)

    def _publish(self) -> None:
        totals = self.totals
        counts = self._parts.board.snapshot().rollouts.model_copy(
            update={
                "classes": dict(totals.classes),
                "excluded": totals.excluded,
                "superseded": totals.superseded,
            }
        )
        self._parts.board.update(
            rollouts=counts,
            tokens=totals.tokens,
            validation=tuple(totals.validation),
            skipped_steps=totals.skipped_steps,
            skipped_in_row=self._skipped_in_row,
        )

    def _write_down(
        self, step: int, metrics: UpdateMetrics, validation: Sequence[ValidationResult]
    ) -> Mapping[str, float]:
        elapsed = time.monotonic() - self._clock.started
        tokens = self._line["prompt_tokens"] + self._line["completion_tokens"]
        line = {
            **self._line,
            "unix_time": time.time(),
            "incarnation": self._incarnation.number,
            "policy_version": self._version,
            "degraded": self._agreement.degraded,
            **update_metrics(metrics),
            **validation_metrics(validation),
            "step_seconds": elapsed,
            "seconds": dict(self._clock.seconds),
            "tokens_per_second": tokens / elapsed if elapsed else None,
        }
        self._parts.metrics.append(line)
        assert self._first_began is not None
        per_step = (time.monotonic() - self._first_began) / (step - self._incarnation.resumed_step)
        self._parts.board.update(
            tokens_per_second=line["tokens_per_second"], eta_seconds=max(0, self.steps - step) * per_step
        )
        return {
            f"rollout/{key}": float(value)
            for key, value in self._line.items()
            if isinstance(value, int | float) and key != "step"
        } | {f"{result.mode}/reward": result.reward for result in validation if result.reward is not None}
