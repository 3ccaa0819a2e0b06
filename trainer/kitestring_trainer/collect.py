"""Backend collect: rollouts, traces and scores without updates."""

from __future__ import annotations

import math
import threading

from kitestring_trainer.errors import RunStoppedError
from kitestring_trainer.learner import Agreement, StepSource, UpdateMetrics

NO_AGREEMENT = Agreement(tokens=0, correlation=None, kl_k1=None, kl_k3=None, largest_difference=None)


class CollectLearner:
    """A learner that makes no updates: every step is over when its rollouts are committed."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._stop = threading.Event()

    def run(self, source: StepSource) -> None:
        step = self._first_step
        while step <= source.steps:
            if self._stop.is_set():
                raise RunStoppedError(f"stopped before step {step}")
            batch = source.step_batch(step)
            source.step_finished(step, no_update(step, len(batch.rows)))
            step += 1

    def request_stop(self) -> None:
        self._stop.set()


def no_update(step: int, rows: int) -> UpdateMetrics:
    """The metrics of a step without an update."""
    return UpdateMetrics(
        step=step,
        updates=0,
        loss=(),
        grad_norm=(),
        learning_rate=0.0,
        entropy=math.nan,
        clip_fraction=0.0,
        policy_kl=0.0,
        rows=rows,
        tokens=0,
        trained_tokens=0,
        agreement=NO_AGREEMENT,
        seconds={},
        raw={},
    )
