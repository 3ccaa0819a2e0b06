"""What a training backend takes and gives: plain data and two protocols.

The step runner makes a `StepBatch` of rows that are already assigned to mini-batches, have their advantage and
carry their share of the loss. A `Learner` turns each batch into optimizer updates and new weights. Nothing here
knows which library does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kitestring_api import names
from kitestring_trainer.errors import RunFailedError, UserMistakeError

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


class LearnerConfigError(UserMistakeError):
    """The run asks for what the backend cannot do, or names a file that is not there."""

    def __init__(self, field_name: str, found: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{field_name} is {found!r}; allowed: {allowed}. {remedy}")
        self.field, self.found, self.allowed, self.remedy = field_name, found, allowed, remedy


class TrainerLostError(RunFailedError):
    """A process of the training backend died."""

    def __init__(self, message: str) -> None:
        super().__init__(names.REASON_TRAINER_LOST, message, restart_helps=True)


@dataclass(frozen=True)
class TrainingRow:
    """One row of an update. P prompt tokens, R response tokens; all arrays of the response have length R."""

    rollout: str
    group: str
    mini_batch: int
    """Index of the optimizer update that takes the row, 0 … `StepBatch.updates` - 1."""
    prompt_ids: Ids
    """[P], P ≥ 1."""
    response_ids: Ids
    """[R], R ≥ 1."""
    response_mask: Ids
    """[R], 1 = trained token, 0 = token the policy did not write."""
    rollout_logprobs: Floats
    """[R], natural logarithm as sampled from; 0.0 where the mask is 0."""
    advantage: float
    """Of the whole rollout, the same in all of its rows."""
    loss_weight: float
    """1 / (N · T_i): N counted rollouts of the mini-batch (those without advantage included), T_i trained tokens of
    the rollout over all of its rows."""
    current_version: Flags
    """[R], token was sampled from exactly the weights that this step starts from."""


@dataclass(frozen=True)
class StepBatch:
    """All rows of one step; `updates` optimizer updates are made of it, in the order of `mini_batch`."""

    step: int
    rows: tuple[TrainingRow, ...]
    updates: int


@dataclass(frozen=True)
class PushedWeights:
    """A complete Hugging Face folder of one weight version. It stays until the version after the next is served."""

    version: int
    path: Path


@dataclass(frozen=True)
class Agreement:
    """Sampler against trainer, over trained tokens that were sampled at the version the step starts from."""

    tokens: int
    correlation: float | None
    """Pearson correlation of the probabilities of the sampled tokens; None with fewer than two tokens."""
    kl_k1: float | None
    """Mean of log p_sampler - log p_trainer: unbiased estimate of KL(sampler ‖ trainer), may be negative."""
    kl_k3: float | None
    """Mean of r - 1 - log r with r = p_trainer / p_sampler: the same quantity, never negative, less noise."""
    largest_difference: float | None
    """Largest |log p_sampler - log p_trainer|."""


@dataclass(frozen=True)
class UpdateMetrics:
    """What one step did. Lists have one entry per optimizer update that was made."""

    step: int
    updates: int
    """Optimizer updates that were made; 0 when no token had anything to say."""
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    """Before clipping."""
    learning_rate: float
    """Of this step's updates; 0.0 when there was none."""
    entropy: float
    """Mean over trained tokens, before the updates, in nats."""
    clip_fraction: float
    """Share of trained tokens with advantage whose gradient the clip cut off, over all updates."""
    policy_kl: float
    """Mean of log p_before - log p_now over the updates' tokens: how far the updates went."""
    rows: int
    tokens: int
    """Prompt and response tokens of all rows."""
    trained_tokens: int
    agreement: Agreement
    seconds: Mapping[str, float]
    """Wall seconds per phase: gen (waiting for rollouts), put, old_log_prob, update_actor, push, save_checkpoint."""
    raw: Mapping[str, float]
    """Every number under the backend's own name."""


@dataclass(frozen=True)
class LoraConfig:
    rank: int
    alpha: int
    target_modules: tuple[str, ...] = ()
    """Names of the modules that get an adapter; empty: all linear layers."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. All updates of a step have the same learning rate. Of the s-th step (from 1) that makes an update it is
    `learning_rate` · min(1, s / (warmup_steps + 1))."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0


@dataclass(frozen=True)
class LossConfig:
    """PPO: ratio clipped to [1 - clip_low, 1 + clip_high]; for an advantage A < 0 the loss is at most dual_clip·|A|."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """Of KL(policy ‖ initial policy), k3 estimate, in the loss, with the same weight per rollout as the policy loss."""


@dataclass(frozen=True)
class LearnerConfig:
    model: Path
    """Hugging Face folder: config, safetensors, tokenizer."""
    weights: Path
    """Folder for pushed versions: one subfolder per version."""
    checkpoints: Path
    """Folder for resumable states (optimizer, schedule, random state): one subfolder per step."""
    total_steps: int
    """As wanted when the learner starts: the length of a learning-rate schedule that has one. How many steps are made
    is the source's to say."""
    updates_per_step: int
    max_prompt_tokens: int
    max_response_tokens: int
    optimizer: OptimizerConfig
    loss: LossConfig = LossConfig()
    lora: LoraConfig | None = None
    micro_batch_tokens: int = 8192
    """Most tokens, padding included, of one forward pass on one rank; never fewer than one row's."""
    device: str = "cpu"
    """cpu | cuda"""
    weights_dtype: str = "float32"
    """Of pushed weights: float32 | bfloat16 | float16."""
    nodes: int = 1
    gpus_per_node: int = 1
    """On cpu: processes per node."""
    threads: int = 0
    """Torch threads of each training process on cpu; 0: all cores divided by the processes."""
    loggers: tuple[str, ...] = ()
    """verl's metric loggers: console, tensorboard, wandb, mlflow."""
    project: str = "kitestring"
    run: str = "run"
    log_folder: Path | None = None
    """Where tensorboard files go; None: beside the checkpoints."""
    overrides: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """verl configuration keys (dotted) of the user; those that the backend sets itself are refused."""
    save_every: int = 1
    """Steps between resumable states; 0: only at a stop."""
    keep_states: int = 2
    keep_weights: int = 2
    resume_from: Path | None = None
    """A resumable state written by this backend."""
    temperature: float = 1.0
    """At which rollouts are sampled; log-probabilities are of the distribution at this temperature."""
    seed: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the training processes."""
    stop_seconds: float = 15.0
    """How long after `request_stop` an update that has begun may take; then it is given up, to be made again."""
    ray_head: str | None = None
    """host:port of Ray on the first of `nodes` machines; None: there is this one only."""
    ray_token: str | None = field(default=None, repr=False)
    """Secret that the machines of the run share; None: made up for a cluster of one machine."""


class StepSource(Protocol):
    """What a learner pulls its work from. All methods are called from the learner's threads, one at a time."""

    @property
    def steps(self) -> int:
        """The last step to be made. May change between two steps: it is asked before each one."""

    def step_batch(self, step: int) -> StepBatch:
        """Block until the rollouts of `step` are committed. What it raises ends the run with that error."""

    def weights_ready(self, weights: PushedWeights) -> None:
        """Block until every policy server serves the version. Called at start (version 0 or the resumed step) and
        after each step."""

    def step_finished(self, step: int, metrics: UpdateMetrics) -> Mapping[str, float] | None:
        """The step's weights are served. Validation happens here; numbers it returns go to the metric loggers."""

    def state_saved(self, step: int, folder: Path) -> None:
        """The resumable state after `step` is durable in `folder`, whole; it stays for two more of them."""


class Learner(Protocol):
    def run(self, source: StepSource) -> None:
        """Train to the end. Raises what the source raised, `LearnerConfigError` (or another `UserMistakeError`),
        `RunStoppedError` after `request_stop`, or `TrainerLostError`. A source that raises RunStoppedError or
        RunFailedError costs no finished update: a resumable state is written first."""

    def request_stop(self) -> None:
        """From any thread or a signal handler: stop before the next update; a resumable state is written first, unless
        the update in progress takes too long and is given up."""
