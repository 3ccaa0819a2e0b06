"""Which learner a run has, and from which of its steps that learner can go on."""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from kitestring_trainer.collect import CollectLearner
from kitestring_trainer.config import TrainerConfig, read_credential
from kitestring_trainer.learner import (
    Learner,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
)
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.verl_backend import folders

LEARNERS_SHARE = 0.6
"""Of the time that a stop may take; the rest is for its state's way into storage."""


def resumable_step(config: TrainerConfig, ledger: Ledger) -> int:
    """The step after which the run goes on; 0: from the initial model.

    Without updates there is nothing to lose: a collecting run goes on after its last committed step.
    """
    if config.spec.trainer.backend == "collect":
        return ledger.last_committed_step()
    newest = folders.newest_state(config.folder / "checkpoints")
    marker = folders.read_marker(newest, folders.STATE_MARKER) if newest is not None else None
    return int(str(marker["step"])) if marker is not None else 0


def make_learner(config: TrainerConfig, resumed_step: int) -> Learner:
    """The learner of the run, which goes on after `resumed_step`."""
    if config.spec.trainer.backend == "collect":
        return CollectLearner(resumed_step + 1)
    from kitestring_trainer.verl_backend import VerlLearner  # noqa: PLC0415  heavy

    return VerlLearner(learner_config(config, resumed_step))


def weights_dtype(config: TrainerConfig) -> Literal["float32", "bfloat16"]:
    """Type of the weights that are pushed and exported."""
    return "float32" if config.spec.trainer.device == "cpu" else "bfloat16"


def learner_config(config: TrainerConfig, resumed_step: int) -> LearnerConfig:
    """What the backend needs of the run. Raises LearnerConfigError for what no backend can give."""
    spec, algorithm, trainer = config.spec, config.spec.algorithm, config.spec.trainer
    assert config.model is not None
    lora = config.policy.lora
    checkpoints = config.folder / "checkpoints"
    return LearnerConfig(
        model=config.model,
        weights=config.folder / "weights",
        checkpoints=checkpoints,
        total_steps=spec.steps,
        updates_per_step=algorithm.updates_per_step,
        max_prompt_tokens=algorithm.max_row_tokens.prompt,
        max_response_tokens=algorithm.max_row_tokens.response,
        optimizer=OptimizerConfig(
            learning_rate=algorithm.optimizer.learning_rate,
            betas=(algorithm.optimizer.betas[0], algorithm.optimizer.betas[1]),
            weight_decay=algorithm.optimizer.weight_decay,
            grad_clip=algorithm.optimizer.grad_clip,
            warmup_steps=algorithm.optimizer.warmup_steps,
        ),
        loss=LossConfig(
            clip_low=algorithm.loss.clip_low,
            clip_high=algorithm.loss.clip_high,
            dual_clip=algorithm.loss.dual_clip,
            entropy_coefficient=algorithm.loss.entropy_coefficient,
            kl_coefficient=algorithm.loss.kl.coefficient,
        ),
        lora=None if lora is None else LoraConfig(lora.rank, lora.alpha, _modules(lora.target_modules)),
        device=trainer.device,
        weights_dtype=weights_dtype(config),
        nodes=trainer.nodes,
        gpus_per_node=trainer.gpus_per_node or 1,
        loggers=tuple(trainer.loggers),
        project=trainer.project or "kitestring",
        run=config.run,
        log_folder=config.folder / "tensorboard",
        overrides=dict(trainer.overrides),
        save_every=spec.checkpoints.resume_every,
        resume_from=folders.state_folder(checkpoints, resumed_step) if resumed_step else None,
        temperature=spec.rollouts.sampling.temperature,
        seed=spec.seed,
        ray_head=config.ray_head,
        ray_token=None if config.ray_head is None else ray_token(read_credential(config.gateway_credential_file)),
        stop_seconds=LEARNERS_SHARE * config.timing.stop,
    )


def ray_token(credential: str) -> str:
    """What the run's machines tell each other to be let into Ray; follows from a secret that all of them have."""
    return hmac.new(credential.encode(), b"ray", hashlib.sha256).hexdigest()


def _modules(names: list[str]) -> tuple[str, ...]:
    """The backend's way to say all linear layers is to name none."""
    return () if names == ["all-linear"] else tuple(names)
