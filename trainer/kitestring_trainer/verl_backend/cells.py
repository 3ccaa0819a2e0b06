"""Deals the rows of a step to mini-batches, ranks and micro-batches. Pure.

verl hands each data-parallel rank one contiguous slice of the batch and cuts that slice into mini-batches of equal
row count, in order. A *cell* is one mini-batch on one rank. Every cell gets the same number of rows, no-op rows
(nothing trained in them) filling it up, and its rows stand longest first, so that micro-batches cut from it pad little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NO_OP = -1


@dataclass(frozen=True)
class Layout:
    order: tuple[int, ...]
    """Indices of rows, `NO_OP` for a no-op row: rank by rank, in each rank mini-batch by mini-batch."""
    mini_batches: tuple[int, ...]
    """The mini-batches that have rows, in order; the others are left out, since an update without rows is none."""
    rows_per_cell: int
    micro_batch_rows: int
    """Divides `rows_per_cell`."""

    @property
    def no_op_rows(self) -> int:
        return sum(index == NO_OP for index in self.order)


def deal(
    lengths: Sequence[int], mini_batch_of: Sequence[int], members: Sequence[int], ranks: int, micro_batch_tokens: int
) -> Layout:
    """Deal the rows `members` (indices) into cells.

    Args:
        lengths: tokens of each row, prompt and response.
        mini_batch_of: mini-batch of each row.
        members: the rows to deal; others are left out.
        ranks: data-parallel ranks, ≥ 1.
        micro_batch_tokens: bound of (rows of a micro-batch) · (longest row); a row longer than it goes alone.

    A mini-batch's rows go to the ranks in snake order of length: counts differ by at most one, tokens by little.
    """
    mini_batches = tuple(sorted({mini_batch_of[index] for index in members}))
    cells: dict[tuple[int, int], list[int]] = {(rank, m): [] for rank in range(ranks) for m in mini_batches}
    for m in mini_batches:
        longest_first = sorted((i for i in members if mini_batch_of[i] == m), key=lambda i: (-lengths[i], i))
        for position, index in enumerate(longest_first):
            lap, place = divmod(position, ranks)
            cells[(place if lap % 2 == 0 else ranks - 1 - place, m)].append(index)
    fullest = max((len(cell) for cell in cells.values()), default=0)
    if not fullest:
        return Layout((), (), 0, 0)
    longest = max(lengths[i] for i in members)
    micro_batches = -(-fullest // max(1, micro_batch_tokens // longest))
    micro_batch_rows = -(-fullest // micro_batches)
    rows_per_cell = micro_batches * micro_batch_rows
    order = [
        index
        for rank in range(ranks)
        for m in mini_batches
        for index in cells[(rank, m)] + [NO_OP] * (rows_per_cell - len(cells[(rank, m)]))
    ]
    return Layout(tuple(order), mini_batches, rows_per_cell, micro_batch_rows)
