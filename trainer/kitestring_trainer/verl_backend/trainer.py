"""verl's V1 trainer in a mode of its own: rollouts come from a `StepSource`, weights go out as folders.

verl keeps the loop, the worker group, the engine, TransferQueue, checkpoints of the engine, and the loggers. What is
overridden here is what has no meaning without rollouts of verl's: its data loader, replay buffer, reward workers
and advantage estimators (rows arrive with their advantage), and its batching, which would tear rollouts apart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.debug import marked_timer

from kitestring_trainer.learner import (
    LearnerConfig,
    PushedWeights,
    StepBatch,
)
from kitestring_trainer.verl_backend import cells, folders, rows, shards
from kitestring_trainer.verl_backend.feed import RolloutFeed
from kitestring_trainer.verl_backend.loss import RolloutLoss, response_positions
from kitestring_trainer.verl_backend.names import TRAINER_MODE, WEIGHTS_BACKEND
from kitestring_trainer.verl_backend.report import report
from kitestring_trainer.verl_backend.states import save_state, saved_at_the_end, state_step
from kitestring_trainer.verl_backend.worker import PolicyWorker

PARTITION = "train"
NO_LAST_STEP = 2**31 - 1
FORWARD_FIELDS = ["input_ids", "position_ids", "loss_mask"]
UPDATE_FIELDS = [*FORWARD_FIELDS, "advantages", "old_log_probs"]


@dataclass
class _Step:
    """What is known of the step in progress."""

    batch: StepBatch
    keys: list[str]
    """Of the batch's rows, then of the no-op rows."""
    every_row: cells.Layout
    update: cells.Layout
    old_log_probs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[all response tokens], rows one after another."""
    entropy: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    updates: dict[str, list[float]] = field(default_factory=dict)
    push_seconds: float = 0.0

    def keys_of(self, layout: cells.Layout) -> list[str]:
        no_op = iter(self.keys[len(self.batch.rows) :])
        return [next(no_op) if index == cells.NO_OP else self.keys[index] for index in layout.order]


class _NoServers:
    """In place of verl's manager of inference servers: they are not verl's, and its load balancer is a process."""

    @classmethod
    def create_empty(cls, config: object) -> _NoServers:
        return cls()

    def get_replicas(self) -> list[object]:
        return []

    def start_profile(self) -> None: ...

    def stop_profile(self) -> None: ...


class _StepBuffer:
    """In place of verl's replay buffer, which polls TransferQueue every two seconds, and for ever."""

    def __init__(self, trainer: ExternalTrainer) -> None:
        self._trainer = trainer

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        return self._trainer.receive(global_steps), {}


@trainer_base.register_trainer(TRAINER_MODE)
class ExternalTrainer(trainer_base.PPOTrainer):
    _enable_hybrid_replicas = False

    def __init__(self, verl_config: DictConfig, settings: LearnerConfig, feed: RolloutFeed) -> None:
        super().__init__(verl_config)
        self.settings, self.feed = settings, feed
        self._step: _Step | None = None
        self._saved_step = 0

    # -- start ---------------------------------------------------------------------------------------------------

    def _build_replay_buffer(self) -> _StepBuffer:
        return _StepBuffer(self)

    def _init_dataloader(self) -> None:
        """No data set: tasks are the queue's. What verl derives from one is set here.

        verl looks at the number of steps as a step begins, and ours may change in its midst: verl's is a number that no
        run reaches, until the last step is over.
        """
        self.total_training_steps = NO_LAST_STEP
        self.steps_per_epoch = NO_LAST_STEP + 1
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.settings.total_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(PolicyWorker)

    def _load_checkpoint(self) -> None:
        self.global_steps = 0
        folder = self.settings.resume_from
        if folder is not None:
            self.global_steps = state_step(folder)
            self._load_engine(folder / "actor")

    def on_init_end(self) -> None:
        self.actor_rollout_wg.set_loss_fn(RolloutLoss(self.settings.loss))

    def on_train_begin(self) -> None:
        # fit() has counted on to the step that comes next.
        done = self.global_steps - 1
        folders.drop_later(self.settings.weights, "v", done)
        folders.drop_later(self.settings.checkpoints, "state-", done)
        self._saved_step = done
        self._push(done)
        self._end_after(done)

    def _end_after(self, step: int) -> None:
        """Have verl's loop end if `step` was the last."""
        if step >= self.feed.source.steps:
            self.total_training_steps = step

    # -- one step ------------------------------------------------------------------------------------------------

    def prepare_step(self) -> dict[str, float]:
        self.feed.begin(self.global_steps)
        return {}

    def on_sample_end(self) -> None: ...

    def receive(self, step: int) -> KVBatchMeta:
        """Wait for the step's rows and put them into TransferQueue."""
        with saved_at_the_end(partial(self._save, step - 1)):
            batch = self.feed.take(step)
        rows.check_batch(batch, self.settings)
        with marked_timer("put", self.timing_raw):
            self._step = self._plan(batch)
            self._put(self._step)
        return self._meta(self._step, self._step.every_row, FORWARD_FIELDS)

    def _plan(self, batch: StepBatch) -> _Step:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in batch.rows]
        ranks, tokens = self.settings.nodes * self.settings.gpus_per_node, self.settings.micro_batch_tokens
        loss = self.settings.loss
        every_token_counts = bool(loss.entropy_coefficient or loss.kl_coefficient)
        useful = [i for i, row in enumerate(batch.rows) if rows.has_signal(row, every_token_counts)]
        every_row = cells.deal(lengths, [0] * len(lengths), range(len(lengths)), ranks, tokens)
        update = cells.deal(lengths, [row.mini_batch for row in batch.rows], useful, ranks, tokens)
        # verl clears the step's keys at its end and cannot with none: an empty batch has a no-op row.
        no_op_rows = max(every_row.no_op_rows, update.no_op_rows, 0 if batch.rows else 1)
        # uids are ours; verl's format of a key is uid_session_index.
        keys = [f"s{batch.step}_{i}_0" for i in range(len(batch.rows))]
        keys += [f"noop{batch.step}_{i}_0" for i in range(no_op_rows)]
        return _Step(batch, keys, every_row, update)

    def _put(self, step: _Step) -> None:
        loss = self.settings.loss
        columns = rows.columns(
            step.batch.rows,
            no_op_rows=len(step.keys) - len(step.batch.rows),
            no_op_token=int(self.tokenizer.eos_token_id or 0),
            with_weights=bool(loss.entropy_coefficient or loss.kl_coefficient),
        )
        self._put_columns(step.keys, columns, tags=[{"status": "success"} for _ in step.keys])

    def _put_columns(
        self, keys: list[str], columns: Mapping[str, rows.Column], tags: list[dict[str, str]] | None = None
    ) -> None:
        nested = {
            name: torch.nested.nested_tensor_from_jagged(
                torch.from_numpy(column.values), offsets=torch.from_numpy(column.offsets)
            )
            for name, column in columns.items()
        }
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=TensorDict(nested, batch_size=len(keys)), tags=tags)

    def _meta(self, step: _Step, layout: cells.Layout, fields: list[str]) -> KVBatchMeta:
        """What a training process fetches, and how it cuts it up."""
        keys = step.keys_of(layout) or step.keys
        on_cpu = self.settings.device == "cpu"
        return KVBatchMeta(
            partition_id=PARTITION,
            keys=keys,
            tags=[{} for _ in keys],
            fields=fields,
            extra_info={
                "temperature": self.settings.temperature,
                # Without padding (GPU) verl packs micro-batches by tokens; with it, rows of like length go together.
                "use_dynamic_bsz": not on_cpu,
                "micro_batch_size_per_gpu": layout.micro_batch_rows,
                "max_token_len_per_gpu": max(
                    self.settings.micro_batch_tokens,
                    self.settings.max_prompt_tokens + self.settings.max_response_tokens,
                ),
            },
        )

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, float],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        return batch  # dealt by `cells`

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        step = self._current()
        if step.batch.rows:
            batch.extra_info |= {"calculate_entropy": True, "compute_loss": False}
            self.actor_rollout_wg.compute_log_prob(batch)
            step.old_log_probs, step.entropy = self._response_outputs(step, ["log_probs", "entropy"])
            if step.update.order:
                self._put_response("old_log_probs", step, step.old_log_probs)
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        step = self._current()
        if step.update.order:
            reference = self._meta(step, step.every_row, FORWARD_FIELDS)
            reference.extra_info |= {"calculate_entropy": False, "compute_loss": False}
            if self.ref_in_actor:
                reference.extra_info["no_lora_adapter"] = True
                self.actor_rollout_wg.compute_log_prob(reference)
            else:
                self.ref_policy_wg.compute_ref_log_prob(reference)
            (ref_log_probs,) = self._response_outputs(step, ["log_probs"])
            self._put_response("ref_log_prob", step, ref_log_probs)
        return batch

    def _response_outputs(self, step: _Step, fields: list[str]) -> list[npt.NDArray[np.float32]]:
        """Outputs of a forward pass for the response tokens of the batch's rows, one after another."""
        keys = step.keys[: len(step.batch.rows)]
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields)
        take = response_positions(data[fields[0]].offsets(), torch.from_numpy(self._response_offsets(step)))
        return [data[name].values()[take].numpy() for name in fields]

    @staticmethod
    def _response_offsets(step: _Step) -> npt.NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum([len(row.response_ids) for row in step.batch.rows], dtype=np.int64)))

    def _put_response(self, name: str, step: _Step, values: npt.NDArray[np.float32]) -> None:
        """Store one value per response token, 0 for no-op rows' one."""
        no_op_rows = len(step.keys) - len(step.batch.rows)
        offsets = self._response_offsets(step)
        offsets = np.concatenate((offsets, offsets[-1] + 1 + np.arange(no_op_rows)))
        padded = np.concatenate((values, np.zeros(no_op_rows, dtype=np.float32)))
        self._put_columns(step.keys, {name: rows.Column(padded, offsets)})

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        return batch  # rows come with their advantage

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """One optimizer step per mini-batch that has something to say, in order.

        A mini-batch in which no token has a gradient is left out: AdamW's momentum and weight decay would move the
        weights all the same.
        """
        step = self._current()
        if not step.update.order:
            return batch
        loss = self.settings.loss
        fields = [*UPDATE_FIELDS]
        if loss.entropy_coefficient or loss.kl_coefficient:
            fields.append("loss_weights")
        if loss.kl_coefficient:
            fields.append("ref_log_prob")
        update = self._meta(step, step.update, fields)
        ranks = self.settings.nodes * self.settings.gpus_per_node
        update.extra_info |= {
            "calculate_entropy": bool(loss.entropy_coefficient),
            "mini_batch_size": step.update.rows_per_cell * ranks,
            "epochs": 1,
            "seed": self.settings.seed,
            "dataloader_kwargs": {"shuffle": False},
        }
        output = self.actor_rollout_wg.update_actor(update)
        step.updates = {name: [float(v) for v in values] for name, values in output["metrics"].items()}
        return batch

    # -- end of a step -------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        self._save(self.global_steps)

    def _save(self, step: int) -> None:
        """Write a resumable state of the present weights, which are those after `step`."""
        if step > self._saved_step:
            folder = save_state(self.settings, step, self._save_engine)
            self._saved_step = step
            self.feed.source.state_saved(step, folder)

    def _save_engine(self, folder: str) -> None:
        """Have every training process write its shard; all of them get into this machine's `folder`."""
        group = self.actor_rollout_wg
        group.save_checkpoint(folder)
        if self.settings.nodes > 1:
            with shards.Probe(Path(folder)) as probe:
                shards.collect(Path(folder), lambda number: group.send_shards(folder, str(probe), number))
                group.forget_state(folder, str(probe))

    def _load_engine(self, folder: Path) -> None:
        group = self.actor_rollout_wg
        if self.settings.nodes == 1:
            group.load_checkpoint(str(folder), del_local_after_load=False)
            return
        with shards.Probe(folder) as probe:
            lacking = group.lacks_shards(str(probe))
            shards.hand_out(folder, lacking, lambda chunks: group.take_shards([str(folder)] * len(chunks), chunks))
            group.load_checkpoint(str(folder), del_local_after_load=False)
            group.forget_state(str(folder), str(probe))

    def on_step_end(self) -> None:
        if self.global_steps >= self.feed.source.steps:
            self._save(self.global_steps)
        started = time.perf_counter()
        self._push(self.global_steps)
        self._current().push_seconds = time.perf_counter() - started

    def _push(self, version: int) -> None:
        ray.get(self.actor_rollout_wg.update_weights(global_steps=version, mode=WEIGHTS_BACKEND))
        path = folders.weights_folder(self.settings.weights, version)
        with saved_at_the_end(partial(self._save, version)):
            self.feed.source.weights_ready(PushedWeights(version, path))
        folders.prune(self.settings.weights, "v", folders.WEIGHTS_MARKER, self.settings.keep_weights)

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        step = self._current()
        done = report(
            step.batch, step.old_log_probs, step.entropy, step.updates, {**timing_raw, "push": step.push_seconds}
        )
        metrics.clear()
        metrics.update(done.raw)
        # fit() clears the keys of the batch it was given; the no-op rows of the update may be more.
        batch.keys = step.keys
        with saved_at_the_end(partial(self._save, global_steps)):
            metrics.update(self.feed.source.step_finished(global_steps, done) or {})
        self._step = None
        self._end_after(global_steps)

    def _current(self) -> _Step:
        if self._step is None:
            raise RuntimeError("no step in progress")
        return self._step


def without_servers() -> None:
    """verl's trainer creates its server manager by this name."""
    trainer_base.LLMServerManager = _NoServers
