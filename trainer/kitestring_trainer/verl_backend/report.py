"""What a step did, as plain numbers: for the run and, under verl's names, for its metric loggers. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kitestring_trainer.learner import Floats, StepBatch, UpdateMetrics
from kitestring_trainer.verl_backend.agreement import agreement

T = TypeVar("T", bound=np.generic)


def report(
    batch: StepBatch,
    old_log_probs: Floats,
    entropy: Floats,
    updates: Mapping[str, Sequence[float]],
    seconds: Mapping[str, float],
) -> UpdateMetrics:
    """Sum up a step.

    Args:
        old_log_probs, entropy: [response tokens of all rows, one after another], before the updates.
        updates: one number per optimizer update; `loss_tokens`, `loss_clipped`, `loss_log_ratio` are sums over the
            tokens that have a gradient.
    """
    mask = _joined([row.response_mask for row in batch.rows], np.int64) == 1
    current = _joined([row.current_version for row in batch.rows], np.bool_)
    agreed = agreement(_joined([row.rollout_logprobs for row in batch.rows], np.float32), old_log_probs, mask & current)
    moved = sum(updates.get("loss_tokens", ()))
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in batch.rows)
    named: dict[str, float | None] = {
        "training/global_step": batch.step,
        "training/rollout_actor_probs_pearson_corr": agreed.correlation,
        "training/rollout_actor_kl": agreed.kl_k1,
        "training/rollout_actor_k3_kl": agreed.kl_k3,
        "training/rollout_actor_logprobs_diff_max": agreed.largest_difference,
        "actor/entropy": float(entropy[mask].mean()) if mask.any() else None,
        "actor/ppo_kl": sum(updates.get("loss_log_ratio", ())) / moved if moved else None,
        "actor/pg_clipfrac": sum(updates.get("loss_clipped", ())) / moved if moved else None,
        **{f"actor/{name}": float(np.mean(v)) for name, v in updates.items() if not name.startswith("loss_")},
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        "perf/total_num_tokens": tokens,
    }
    raw = {name: float(value) for name, value in named.items() if value is not None}
    return UpdateMetrics(
        step=batch.step,
        updates=len(updates.get("loss", ())),
        loss=tuple(updates.get("loss", ())),
        grad_norm=tuple(updates.get("grad_norm", ())),
        learning_rate=raw.get("actor/lr", 0.0),
        entropy=raw.get("actor/entropy", 0.0),
        clip_fraction=raw.get("actor/pg_clipfrac", 0.0),
        policy_kl=raw.get("actor/ppo_kl", 0.0),
        rows=len(batch.rows),
        tokens=tokens,
        trained_tokens=int(mask.sum()),
        agreement=agreed,
        seconds=dict(seconds),
        raw=raw,
    )


def _joined(parts: Sequence[npt.NDArray[T]], dtype: type[T]) -> npt.NDArray[T]:
    return np.concatenate([*parts, np.zeros(0, dtype)])
