"""Keys and values of many sequences in slots, and the attention over them.

One forward pass takes a flat row of tokens: one for each sequence that is being continued, then all tokens of the
prompts that join. Everything in the model but attention works on tokens one by one; attention is ours, plugged in
through transformers' attention interface. So a prompt joins at the next token at the price of its own tokens, and a
sequence that leaves costs one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface, PreTrainedConfig

from kitestring_trainer.policy_server.errors import PolicyServerError

IMPLEMENTATION = "kitestring_slots"
"""Name of our attention in `config._attn_implementation`."""
BATCH_ARGUMENT = "kitestring_batch"
"""Keyword argument of the model's forward that carries the Batch to the attention."""


class SlotCache:
    """Keys and values: [layers, 2, slots, length, kv heads, head size], float32, slot and length contiguous.

    Memory is reserved in full but taken from the machine only as slots and lengths come into use. Raises
    PolicyServerError when there is not enough to reserve.
    """

    def __init__(self, config: PreTrainedConfig, slots: int, length: int) -> None:
        heads = int(config.num_attention_heads)
        self.layers = int(config.num_hidden_layers)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self.slots, self.length = slots, length
        shape = (self.layers, 2, slots, length, self.kv_heads, self.head_size)
        try:
            # numpy's zeros are untouched pages; torch's would be written at once.
            self.store = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        except MemoryError as error:
            raise PolicyServerError(
                f"keys and values of {slots} sequences of {length} tokens need {math.prod(shape) * 4 / 2**30:.1f} GiB, "
                "which this machine does not have; lower max_sequences or max_model_len"
            ) from error
        self.cells = self.store.view(self.layers, 2, slots * length, self.kv_heads * self.head_size)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` cells of one slot into another."""
        self.store[:, :, target, :length] = self.store[:, :, source, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot, for what is not a number would spoil whoever uses the slot next, masked or not."""
        self.store[:, :, slot].zero_()


@dataclass(frozen=True)
class Batch:
    """One forward pass. T tokens: first the B that continue slots 0..B-1, then P prompts, one after the other."""

    cache: SlotCache
    input_ids: torch.Tensor
    """int64 [1, T]"""
    position_ids: torch.Tensor
    """int64 [1, T]"""
    cells: torch.Tensor
    """int64 [T]: where each token's key and value go (slot * length + position)."""
    continued: int
    """B"""
    longest: int
    """Cells that the longest continued sequence attends to, the new one included."""
    mask: torch.Tensor | None
    """float32 [B, 1, 1, longest], added to the scores; None when all B are equally long."""
    prompts: int
    """P"""
    longest_prompt: int
    gather: torch.Tensor | None
    """int64 [P * longest_prompt]: token of each cell of the padded prompts; None when nothing is padded."""
    scatter: torch.Tensor | None
    """int64 [T - B]: padded cell of each prompt token; None when nothing is padded."""
    last: torch.Tensor
    """int64 [B + P]: tokens whose logits are wanted."""


def make_batch(
    cache: SlotCache, continued: AbstractSequence[tuple[int, int]], prompts: AbstractSequence[AbstractSequence[int]]
) -> Batch:
    """Lay out one forward pass.

    continued: (token, its position) of the sequences in slots 0..B-1. prompts: ids of those that take slots B..B+P-1,
    none empty.
    """
    count = len(continued)
    slot_length = cache.length
    tokens = [token for token, _ in continued]
    positions = [position for _, position in continued]
    cells = [slot * slot_length + position for slot, position in enumerate(positions)]
    last = list(range(count))
    mask = None
    longest = 0
    if count:
        longest = max(positions) + 1
        if min(positions) + 1 != longest:
            reach = torch.tensor(positions).unsqueeze(1)
            hidden = torch.arange(longest).unsqueeze(0) > reach
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf).view(count, 1, 1, longest)
    lengths = [len(prompt) for prompt in prompts]
    longest_prompt = max(lengths, default=0)
    end = count
    for row, prompt in enumerate(prompts):
        tokens.extend(prompt)
        positions.extend(range(len(prompt)))
        first_cell = (count + row) * slot_length
        cells.extend(range(first_cell, first_cell + len(prompt)))
        end += len(prompt)
        last.append(end - 1)
    gather = scatter = None
    if prompts and min(lengths) != longest_prompt:
        columns = np.arange(longest_prompt)
        sizes = np.asarray(lengths)
        starts = count + np.cumsum(sizes) - sizes
        # A cell beyond its prompt repeats the prompt's last token: finite, after all real ones, and dropped.
        gather = torch.from_numpy((starts[:, None] + np.minimum(columns[None, :], sizes[:, None] - 1)).ravel())
        scatter = torch.from_numpy(np.flatnonzero(columns[None, :] < sizes[:, None]))
    return Batch(
        cache=cache,
        input_ids=torch.tensor([tokens]),
        position_ids=torch.tensor([positions]),
        cells=torch.tensor(cells),
        continued=count,
        longest=longest,
        mask=mask,
        prompts=len(lengths),
        longest_prompt=longest_prompt,
        gather=gather,
        scatter=scatter,
        last=torch.tensor(last),
    )


def _attend_continued(
    batch: Batch, layer: int, query: torch.Tensor, scaling: float | None
) -> torch.Tensor:  # query [B, H, D] -> [B, H, D]
    cache = batch.cache
    count, heads, size = query.shape
    keys, values = (
        cache.store[layer, which, :count, : batch.longest].transpose(1, 2) for which in (0, 1)
    )  # [B, kv heads, longest, D]
    # The query heads that share a key head are laid out as that head's queries.
    grouped = query.view(count, cache.kv_heads, heads // cache.kv_heads, size)
    result = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.mask, scale=scaling)
    return result.reshape(count, heads, size)


def _attend_prompts(
    batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:  # [T, heads, D] each -> [T - B, H, D]
    heads = query.shape[1]

    def padded(states: torch.Tensor) -> torch.Tensor:  # [P, H, longest prompt, D]
        rows = states[batch.continued :] if batch.gather is None else states.index_select(0, batch.gather)
        rows = rows.view(batch.prompts, batch.longest_prompt, *states.shape[1:]).transpose(1, 2)
        return rows if states.shape[1] == heads else rows.repeat_interleave(heads // states.shape[1], dim=1)

    result = F.scaled_dot_product_attention(padded(query), padded(key), padded(value), is_causal=True, scale=scaling)
    flat = result.transpose(1, 2).reshape(-1, *query.shape[1:])
    return flat if batch.scatter is None else flat.index_select(0, batch.scatter)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' interface: query [1, H, T, D], key and value [1, kv heads, T, D] -> [1, T, H, D]."""
    batch: Batch = kwargs[BATCH_ARGUMENT]
    for feature in ("softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise PolicyServerError(f"the model's attention uses {feature}, which the CPU policy server does not know")
    window = kwargs.get("sliding_window")
    if window is not None and window < batch.cache.length:
        raise PolicyServerError(
            f"the model attends to a sliding window of {window} tokens only; set max_model_len to {window} or less"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, D]
    total = query.shape[0]
    keys, values = batch.cache.cells[layer]
    keys.index_copy_(0, batch.cells, key.reshape(total, -1))
    values.index_copy_(0, batch.cells, value.reshape(total, -1))
    parts = []
    if batch.continued:
        parts.append(_attend_continued(batch, layer, query[: batch.continued], scaling))
    if batch.prompts:
        parts.append(_attend_prompts(batch, query, key, value, scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, slot_attention)
