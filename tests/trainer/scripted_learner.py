"""A learner whose weights are a name: it keeps the order of things of a real one, and never makes the same twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kitestring_trainer.collect import no_update
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.learner import Agreement, PushedWeights, StepBatch, StepSource
from kitestring_trainer.verl_backend import folders
from kitestring_trainer.verl_backend.states import saved_at_the_end

NAME = "weights_name"
AGREED = Agreement(tokens=10, correlation=0.99999, kl_k1=0.0, kl_k3=1e-7, largest_difference=1e-4)
_serial = itertools.count()


class Killed(BaseException):
    """The process dies here."""


@dataclass(frozen=True)
class Update:
    """One update that was made: of these weights, from these rollouts, into those weights."""

    step: int
    before: str
    after: str
    rollouts: frozenset[str]


class ScriptedLearner:
    """`crash` is called with (where, step) at every point where a process may die."""

    def __init__(
        self,
        config: TrainerConfig,
        resumed_step: int,
        crash: Callable[[str, int], None] = lambda where, step: None,
        agreement: Callable[[int], Agreement] = lambda step: AGREED,
    ) -> None:
        self._folder = config.folder
        self._save_every = config.spec.checkpoints.resume_every
        self._resumed = resumed_step
        self._crash = crash
        self._agreement = agreement
        self._stop = False
        self.updates: list[Update] = []
        self.batches: list[StepBatch] = []

    def request_stop(self) -> None:
        self._stop = True

    def run(self, source: StepSource) -> None:
        state = folders.state_folder(self._folder / "checkpoints", self._resumed)
        self._crash("before it starts", self._resumed)
        name = (state / NAME).read_text() if self._resumed else "initial"
        self._push(source, self._resumed, name)
        step = self._resumed
        while step < source.steps:
            step += 1
            with saved_at_the_end(partial(self._save, source, step - 1, name)):
                batch = source.step_batch(step)
            self.batches.append(batch)
            self._crash("before the update", step)
            after = f"step {step} made by {next(_serial)}"
            rollouts = frozenset(row.rollout for row in batch.rows)
            self.updates.append(Update(step, name, after, rollouts))
            name = after
            if step % self._save_every == 0:
                self._save(source, step, name)
                self._crash("after the save", step)
            self._push(source, step, name)
            self._crash("after the push", step)
            with saved_at_the_end(partial(self._save, source, step, name)):
                source.step_finished(step, replace(no_update(step, len(batch.rows)), agreement=self._agreement(step)))
            self._crash("after the step", step)

    def _push(self, source: StepSource, step: int, name: str) -> None:
        folder = folders.weights_folder(self._folder / "weights", step)
        with folders.WholeFolder(folder, folders.WEIGHTS_MARKER, {"version": step}) as writing:
            (writing / NAME).write_text(name)
        with saved_at_the_end(partial(self._save, source, step, name)):
            source.weights_ready(PushedWeights(step, folder))

    def _save(self, source: StepSource, step: int, name: str) -> None:
        folder = folders.state_folder(self._folder / "checkpoints", step)
        if step and not folder.exists():
            with folders.WholeFolder(folder, folders.STATE_MARKER, {"step": step}) as writing:
                (writing / NAME).write_text(name)
            source.state_saved(step, folder)


def weights_name(folder: str | None) -> str:
    """The name of the weights in a pushed folder; None: the initial model."""
    return "initial" if folder is None else (Path(folder) / NAME).read_text()


NO_TOKENS = Agreement(tokens=0, correlation=None, kl_k1=None, kl_k3=None, largest_difference=None)
APART = Agreement(tokens=10, correlation=0.9, kl_k1=0.1, kl_k3=0.1, largest_difference=math.log(2))
