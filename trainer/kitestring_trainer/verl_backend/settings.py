"""The verl configuration of a run: which of its keys we set, which a user may set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kitestring_trainer.learner import LearnerConfig, LearnerConfigError
from kitestring_trainer.verl_backend.names import TRAINER_MODE, WEIGHTS_BACKEND

USER_PREFIXES = (
    "actor_rollout_ref.actor.fsdp_config.",
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.model.",
    "actor_rollout_ref.ref.fsdp_config.",
    "trainer.wandb_proxy",
)
"""What a user may set. Everything else in verl's configuration is either ours or without effect in this mode."""

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def settings(config: LearnerConfig) -> dict[str, Any]:
    """verl keys that the backend sets, dotted; a leading + adds a key that verl's defaults do not have."""
    processes = config.nodes * config.gpus_per_node
    row_tokens = config.max_prompt_tokens + config.max_response_tokens
    out: dict[str, Any] = {
        "model_engine": "dp",
        f"{_MODEL}.path": str(config.model),
        f"{_MODEL}.use_remove_padding": config.device != "cpu",
        f"{_MODEL}.enable_gradient_checkpointing": config.device != "cpu",
        f"{_ACTOR}.strategy": "fsdp2",
        # verl wants these; batches are cut by `cells`, not by them.
        f"{_ACTOR}.ppo_mini_batch_size": 1,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": max(config.micro_batch_tokens, row_tokens),
        f"{_ACTOR}.use_dynamic_bsz": config.device != "cpu",
        f"{_ACTOR}.use_kl_loss": config.loss.kl_coefficient > 0,
        f"{_ACTOR}.optim.lr": config.optimizer.learning_rate,
        f"{_ACTOR}.optim.betas": list(config.optimizer.betas),
        f"{_ACTOR}.optim.weight_decay": config.optimizer.weight_decay,
        f"{_ACTOR}.optim.clip_grad": config.optimizer.grad_clip,
        f"{_ACTOR}.optim.lr_warmup_steps": config.optimizer.warmup_steps,
        f"{_ROLLOUT}.name": "external",
        f"{_ROLLOUT}.n": processes,
        f"{_ROLLOUT}.temperature": config.temperature,
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": max(config.micro_batch_tokens, row_tokens),
        f"{_ROLLOUT}.checkpoint_engine.backend": WEIGHTS_BACKEND,
        f"{_ROLLOUT}.checkpoint_engine.custom_backend_module": "kitestring_trainer.verl_backend.weights",
        f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.{WEIGHTS_BACKEND}.root": str(config.weights),
        f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.{WEIGHTS_BACKEND}.model": str(config.model),
        f"+{_ROLLOUT}.checkpoint_engine.engine_kwargs.{WEIGHTS_BACKEND}.dtype": config.weights_dtype,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
        "data.train_batch_size": 1,
        "data.max_prompt_length": config.max_prompt_tokens,
        "data.max_response_length": config.max_response_tokens,
        "algorithm.rollout_correction": None,
        "critic.enable": False,
        "reward.num_workers": 0,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": config.nodes,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": TRAINER_MODE,
        "trainer.nnodes": config.nodes,
        "trainer.n_gpus_per_node": config.gpus_per_node,
        "trainer.device": config.device,
        "trainer.logger": list(config.loggers),
        "trainer.project_name": config.project,
        "trainer.experiment_name": config.run,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": config.total_steps,
        "trainer.total_epochs": 1,
        "trainer.save_freq": config.save_every or -1,
        "trainer.default_local_dir": str(config.checkpoints),
        "trainer.resume_mode": "disable",
    }
    if config.device == "cpu":
        out |= {
            f"+{_MODEL}.override_config.attn_implementation": "sdpa",
            f"{_ACTOR}.use_torch_compile": False,
            f"{_ACTOR}.fsdp_config.use_torch_compile": False,
            "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
        }
        for role in ("actor", "ref"):
            for kind in ("param_dtype", "reduce_dtype", "buffer_dtype"):
                out[f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{kind}"] = "fp32"
    if config.lora is not None:
        out |= {
            f"{_MODEL}.lora_rank": config.lora.rank,
            f"{_MODEL}.lora_alpha": config.lora.alpha,
            f"{_MODEL}.target_modules": list(config.lora.target_modules) or "all-linear",
            # Without it the pushed weights are the bare initial model's.
            f"{_MODEL}.lora.merge": True,
        }
    return out


def check(config: LearnerConfig) -> None:
    """Refuse what cannot be carried out, before anything is started.

    Raises:
        LearnerConfigError: names the field, what was found, what is allowed, and the remedy.
    """
    for problem in _problems(config):
        raise problem


def _problems(config: LearnerConfig) -> Iterator[LearnerConfigError]:
    if not (config.model / "config.json").is_file():
        yield LearnerConfigError(
            "model", str(config.model), "a Hugging Face folder (config.json, weights, tokenizer)", "Name such a folder."
        )
    if config.device not in ("cpu", "cuda"):
        yield LearnerConfigError("device", config.device, "cpu, cuda", "Choose one of them.")
    if config.weights_dtype not in _PRECISIONS:
        yield LearnerConfigError("weights_dtype", config.weights_dtype, ", ".join(_PRECISIONS), "Choose one of them.")
    if config.loss.dual_clip <= 1:
        yield LearnerConfigError("loss.dual_clip", config.loss.dual_clip, "more than 1", "The usual value is 3.")
    for name in ("entropy_coefficient", "kl_coefficient"):
        value = getattr(config.loss, name)
        if value < 0:
            yield LearnerConfigError(f"loss.{name}", value, "0 or more", "Set it to 0 to leave the term out.")
    if config.nodes > 1 and config.ray_head is None:
        yield LearnerConfigError(
            "spec.trainer.nodes", config.nodes, "1 on one machine", "Use more gpusPerNode here, or run it in a cluster."
        )
    if config.device == "cuda" and visible_gpus() < config.gpus_per_node:
        yield LearnerConfigError(
            "gpus_per_node",
            config.gpus_per_node,
            f"up to {visible_gpus()}, the GPUs that the trainer sees on this machine",
            "Ask for no more than there are (spec.trainer.gpusPerNode), or give the trainer more.",
        )
    own = {key.lstrip("+") for key in settings(config)}
    for key in config.overrides:
        bare = key.lstrip("+")
        if bare in own or bare.startswith(f"{_MODEL}.lora"):
            yield LearnerConfigError(
                f"overrides[{key!r}]",
                config.overrides[key],
                "keys that the run does not set itself",
                "Set it where the run sets it (policies, algorithm, trainer), and remove the override.",
            )
        if not bare.startswith(USER_PREFIXES):
            yield LearnerConfigError(
                f"overrides[{key!r}]",
                config.overrides[key],
                ", ".join(f"{prefix}*" for prefix in USER_PREFIXES),
                "verl does not read this key in this mode; remove the override.",
            )


def visible_gpus() -> int:
    """GPUs that a training process of this machine could use."""
    import torch  # noqa: PLC0415  heavy

    return torch.cuda.device_count()


def compose(config: LearnerConfig) -> Any:
    """verl's configuration object with our settings and the user's overrides.

    Raises:
        LearnerConfigError: an override names a key that verl does not have.
    """
    from hydra import compose as defaults  # noqa: PLC0415
    from hydra import initialize_config_module  # noqa: PLC0415
    from omegaconf import OmegaConf  # noqa: PLC0415
    from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415

    own = settings(config)
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        composed = defaults("ppo_trainer", overrides=[f"model_engine={own.pop('model_engine')}"])
    OmegaConf.set_struct(composed, True)
    for key, value in own.items():
        OmegaConf.update(composed, key.lstrip("+"), value, force_add=key.startswith("+"))
    for key, value in config.overrides.items():
        try:
            OmegaConf.update(composed, key.lstrip("+"), value, force_add=key.startswith("+"))
        except OmegaConfBaseException as error:
            raise LearnerConfigError(
                f"overrides[{key!r}]",
                value,
                "keys of verl 0.9.1, with values of their type",
                f"verl says: {str(error).splitlines()[0]}. Write +{key} to add a key that it lacks.",
            ) from error
    return composed
