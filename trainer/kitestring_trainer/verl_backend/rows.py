"""Rows as columns of concatenated arrays, the form in which they go through verl's TransferQueue. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kitestring_trainer.learner import Floats, Ids, LearnerConfig, StepBatch, TrainingRow

NO_OP_TOKENS = 2
"""A no-op row: one prompt token, one response token that is not trained."""


@dataclass(frozen=True)
class Column:
    """Values of all rows one after another; row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: npt.NDArray[np.generic]
    offsets: Ids


def check_batch(batch: StepBatch, config: LearnerConfig) -> None:
    """Raise ValueError with the first thing that is wrong; such a batch is a bug of its maker."""
    if batch.updates != config.updates_per_step:
        raise ValueError(f"step {batch.step} has {batch.updates} updates, the run {config.updates_per_step}")
    for row in batch.rows:
        wrong = _wrong(row, batch.updates, config)
        if wrong:
            raise ValueError(f"step {batch.step}, rollout {row.rollout}: {wrong}")


def _wrong(row: TrainingRow, updates: int, config: LearnerConfig) -> str | None:
    prompt, response = len(row.prompt_ids), len(row.response_ids)
    arrays = (row.response_mask, row.rollout_logprobs, row.current_version)
    if any(array.shape != (response,) for array in arrays):
        return f"shapes {[array.shape for array in arrays]} differ from the response's ({response},)"
    most_prompt, most_response = config.max_prompt_tokens, config.max_response_tokens
    finite = np.isfinite([row.advantage, row.loss_weight]).all() and row.loss_weight >= 0
    checks = {
        f"{prompt} prompt tokens, allowed 1 to {most_prompt}": 1 <= prompt <= most_prompt,
        f"{response} response tokens, allowed 1 to {most_response}": 1 <= response <= most_response,
        f"mini-batch {row.mini_batch} of {updates}": 0 <= row.mini_batch < updates,
        f"advantage {row.advantage}, loss weight {row.loss_weight}": finite,
        "a mask that is neither 0 nor 1": np.isin(row.response_mask, (0, 1)).all(),
        "a log-probability that is not finite": np.isfinite(row.rollout_logprobs[row.response_mask == 1]).all(),
    }
    return next((what for what, fine in checks.items() if not fine), None)


def has_signal(row: TrainingRow, every_token_counts: bool) -> bool:
    """Whether an update with the row differs from one without it.

    `every_token_counts`: there is an entropy or KL term, so that a rollout without advantage has a gradient, too.
    """
    return bool(row.response_mask.any()) and row.loss_weight > 0 and (every_token_counts or row.advantage != 0)


def columns(rows: Sequence[TrainingRow], no_op_rows: int, no_op_token: int, with_weights: bool) -> dict[str, Column]:
    """Columns of `rows` followed by `no_op_rows` rows that train nothing.

    input_ids, position_ids: [P + R] per row. loss_mask, advantages (advantage · loss weight where trained, else 0),
    and, `with_weights`, loss_weights (loss weight where trained, else 0): [R] per row.
    """
    filler = np.full(NO_OP_TOKENS, no_op_token, dtype=np.int64)
    sequences = [np.concatenate((row.prompt_ids, row.response_ids)) for row in rows] + [filler] * no_op_rows
    nothing = np.zeros(1, dtype=np.int64)
    masks = [row.response_mask for row in rows] + [nothing] * no_op_rows
    scales = [row.advantage * row.loss_weight for row in rows] + [0.0] * no_op_rows
    out = {
        "input_ids": _column(sequences, np.int64),
        "position_ids": _column([np.arange(len(s)) for s in sequences], np.int64),
        "loss_mask": _column(masks, np.int64),
        "advantages": _column(_scaled(masks, scales), np.float32),
    }
    if with_weights:
        weights = [row.loss_weight for row in rows] + [0.0] * no_op_rows
        out["loss_weights"] = _column(_scaled(masks, weights), np.float32)
    return out


def _scaled(masks: Sequence[Ids], scales: Sequence[float]) -> list[Floats]:
    return [(mask * scale).astype(np.float32) for mask, scale in zip(masks, scales, strict=True)]


def _column(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> Column:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return Column(np.concatenate(parts).astype(dtype, copy=False), offsets)
