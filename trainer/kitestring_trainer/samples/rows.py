"""Rows: transitions merged where one prompt extends the last context by exact token ids.

The rule is the report's best-effort exact-prefix merge (arXiv 2608.17528, §"Sample merging"): call t+1 joins a row iff
its prompt starts with exactly the ids of that row. Unlike the reference implementation, which compares with the
previous call only, every open row is a candidate, so interleaved sub-agents (A1 B1 A2 B2) give two rows and not four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kitestring_rollout.traces.records import VersionSpan
from kitestring_trainer.samples.transitions import Transition

DROPPED_PROMPT = "prompt of {found} tokens over maxRowTokens.prompt {limit}"
DROPPED_RESPONSE = "response of {found} tokens over maxRowTokens.response {limit}"

_TAIL = 16
"""Ids at a row's end compared first: contexts that differ almost always differ there."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    prompt: int
    response: int


@dataclass(frozen=True, slots=True)
class Row:
    """One training sample. `response_ids`, `response_mask`, `logprobs` have the same length R.

    Mask 0 and logprob 0.0 mark what the environment wrote between two replies.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    """Spans over the response; observations lie in no span."""
    transitions: tuple[tuple[int, int], ...]
    """(seq, choice) of each merged transition, in order."""
    dropped: str | None
    """Why the row is not trained on (limits); None for a sample."""

    @property
    def trained_tokens(self) -> int:
        return 0 if self.dropped else int(self.response_mask.sum())


@dataclass(slots=True)
class _OpenRow:
    """A row that may still grow: ids in one buffer that doubles, so that T turns cost O(total ids), not O(T · ids)."""

    prompt_length: int
    ids: NDArray[np.int32]
    length: int
    pieces: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)
    """(offset of a reply in `ids`, its log probabilities)"""
    versions: list[VersionSpan] = field(default_factory=list)
    transitions: list[tuple[int, int]] = field(default_factory=list)

    def continued_by(self, prompt: NDArray[np.int32]) -> bool:
        length = self.length
        if len(prompt) < length:
            return False
        tail = max(0, length - _TAIL)
        return bool(np.array_equal(prompt[tail:length], self.ids[tail:length])) and bool(
            np.array_equal(prompt[:tail], self.ids[:tail])
        )

    def append(self, transition: Transition) -> None:
        prompt, reply = transition.prompt_ids, transition.response_ids
        end = len(prompt) + len(reply)
        if end > len(self.ids):
            grown = np.empty(max(end, 2 * len(self.ids)), np.int32)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : len(prompt)] = prompt[self.length :]
        self.ids[len(prompt) : end] = reply
        self.length = end
        self.pieces.append((len(prompt), transition.logprobs))
        offset = len(prompt) - self.prompt_length
        self.versions.extend(VersionSpan(s.version, s.start + offset, s.end + offset) for s in transition.versions)
        self.transitions.append((transition.seq, transition.choice))

    def close(self, limits: RowLimits) -> Row:
        response = self.length - self.prompt_length
        mask = np.zeros(response, np.bool_)
        logprobs = np.zeros(response, np.float32)
        for start, piece in self.pieces:
            at = start - self.prompt_length
            mask[at : at + len(piece)] = True
            logprobs[at : at + len(piece)] = piece
        dropped = None
        if self.prompt_length > limits.prompt:
            dropped = DROPPED_PROMPT.format(found=self.prompt_length, limit=limits.prompt)
        elif response > limits.response:
            dropped = DROPPED_RESPONSE.format(found=response, limit=limits.response)
        return Row(
            prompt_ids=self.ids[: self.prompt_length],
            response_ids=self.ids[self.prompt_length : self.length],
            response_mask=mask,
            logprobs=logprobs,
            versions=tuple(self.versions),
            transitions=tuple(self.transitions),
            dropped=dropped,
        )


def merge_rows(transitions: Sequence[Transition], limits: RowLimits) -> list[Row]:
    """Rows of one attempt, in the order in which they were begun. Excluded transitions are left out.

    Each choice of a call with n > 1 is a sample of its own: one of them may extend an open row, the others begin rows
    whose prompt is the whole context. A continuation that would make a row's response longer than `limits.response`
    begins a new row instead, so that only a row that is too long by itself is dropped. The longest matching row wins.
    """
    open_rows: list[_OpenRow] = []
    for transition in transitions:
        if transition.excluded is not None:
            continue
        row = _extendable(open_rows, transition, limits)
        if row is None:
            length = len(transition.prompt_ids)
            buffer = np.empty(length + len(transition.response_ids), np.int32)
            buffer[:length] = transition.prompt_ids
            row = _OpenRow(prompt_length=length, ids=buffer, length=length)
            open_rows.append(row)
        row.append(transition)
    return [row.close(limits) for row in open_rows]


def _extendable(rows: Sequence[_OpenRow], transition: Transition, limits: RowLimits) -> _OpenRow | None:
    end = len(transition.prompt_ids) + len(transition.response_ids)
    best: _OpenRow | None = None
    for row in reversed(rows):
        if best is not None and row.length <= best.length:
            continue
        if end - row.prompt_length <= limits.response and row.continued_by(transition.prompt_ids):
            best = row
    return best
