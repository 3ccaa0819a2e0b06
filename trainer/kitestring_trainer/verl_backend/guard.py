"""Refuses to run against a verl whose inside is not the one this package was written for.

verl's trainer is attached to through documented plug-in points and a few methods of its trainer class. The version
is pinned; the parameter names of everything that is called or overridden are compared as well, so that a patched
or vendored copy fails here, with one message, and not in the middle of a run.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version

from kitestring_trainer.errors import UserMistakeError

VERL_VERSION = "0.9.1"

SIGNATURES: dict[str, tuple[str, ...]] = {
    "verl.trainer.ppo.v1.trainer_base:register_trainer": ("name",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.init": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit": ("self", "agent_loop_manager"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.step": ("self", "metrics", "timing_raw"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._build_replay_buffer": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_dataloader": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._init_resource_pool_mgr": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._load_checkpoint": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._save_checkpoint": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.prepare_step": ("self",),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._balance_batch": (
        "self",
        "batch",
        "metrics",
        "logging_prefix",
        "keep_minibatch",
    ),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob": ("self", "batch", "metrics"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_ref_log_prob": ("self", "batch", "metrics"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage": ("self", "batch", "metrics"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._update_actor": ("self", "batch", "metrics"),
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics": (
        "self",
        "batch",
        "metrics",
        "timing_raw",
        "global_steps",
        "epoch",
    ),
    "verl.workers.engine_workers:ActorRolloutRefWorker.update_weights": ("self", "global_steps", "mode"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.set_loss_fn": ("self", "loss_fn"),
    "verl.workers.engine_workers:ActorRolloutRefWorker.save_checkpoint": (
        "self",
        "local_path",
        "hdfs_path",
        "global_step",
        "max_ckpt_to_keep",
    ),
    "verl.workers.engine_workers:ActorRolloutRefWorker.load_checkpoint": (
        "self",
        "local_path",
        "hdfs_path",
        "del_local_after_load",
    ),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead._build_lr_scheduler": ("self", "optimizer"),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.lr_scheduler_step": ("self",),
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead._merged_lora_per_tensor_param": ("self",),
    "verl.utils.fsdp_utils:merged_lora_context": ("actor", "backup_adapters"),
    "verl.utils.distributed:initialize_global_process_group_ray": ("timeout_second", "backend"),
    "verl.single_controller.ray.base:sort_placement_group_by_node_ip": ("pgs",),
    "verl.single_controller.base.decorator:register": (
        "dispatch_mode",
        "execute_mode",
        "blocking",
        "materialize_futures",
    ),
    "verl.single_controller.ray.base:RayWorkerGroup._get_master_addr_port": (
        "self",
        "pg",
        "bundle_index",
        "master_port_range",
    ),
    "verl.checkpoint_engine:CheckpointEngine.send_weights": ("self", "weights", "global_steps"),
    "verl.utils.metric:Metric": ("aggregation", "value"),
    "transfer_queue:init": ("conf",),
    "transfer_queue:kv_batch_put": ("keys", "partition_id", "fields", "tags", "data_parser"),
    "transfer_queue:kv_batch_get": ("keys", "partition_id", "select_fields"),
}
"""Importable name → names of its parameters."""


class VerlMismatchError(UserMistakeError):
    """verl is missing, has another version, or is not the verl of that version."""


def check_version() -> None:
    """Compare the installed version without importing verl."""
    try:
        found = version("verl")
    except PackageNotFoundError as error:
        raise VerlMismatchError(
            f"verl is not installed; allowed: verl=={VERL_VERSION}. Install it: pip install 'kitestring[trainer]'."
        ) from error
    if found != VERL_VERSION:
        raise VerlMismatchError(
            f"verl {found} is installed; allowed: {VERL_VERSION}, the version this release is tested with. "
            f"Install it: pip install verl=={VERL_VERSION}."
        )


def check_signatures(signatures: dict[str, tuple[str, ...]] = SIGNATURES) -> None:
    """Compare every signature in the table with the imported verl.

    Raises:
        VerlMismatchError: lists everything that differs.
    """
    differing = []
    for name, expected in signatures.items():
        module, _, path = name.partition(":")
        found: object = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        actual = tuple(inspect.signature(found).parameters) if callable(found) else None
        if actual != expected:
            differing.append(f"{name}: parameters {actual}, expected {expected}")
    if differing:
        raise VerlMismatchError(
            f"the installed verl calls itself {VERL_VERSION} but differs from it: {'; '.join(differing)}. "
            f"Reinstall it: pip install --force-reinstall --no-deps verl=={VERL_VERSION}."
        )
