"""From logits to tokens. Each sequence brings its own noise, so a draw does not depend on what else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from random import Random

import torch


@dataclass(frozen=True)
class Sampling:
    """How one sequence is sampled. The defaults sample from the model itself."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    alternatives: int = 0
    """Number of most likely tokens to report beside the sampled one."""

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut off from the distribution."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True)
class Drawn:
    """The tokens of one step, a list entry per sequence."""

    tokens: list[int]
    logprobs: list[float]
    """Natural logarithm of the probability in the distribution sampled from; not finite when the logits were not."""
    alternatives: dict[int, list[tuple[int, float]]]
    """Row -> (token, logprob), most likely first, for the rows that asked."""


def draw(logits: torch.Tensor, sampling: AbstractSequence[Sampling], noise: AbstractSequence[Random]) -> Drawn:
    """One token per row.

    logits: float [B, V]. The distribution is softmax(logits / temperature), cut to top_k, then to top_p, and
    renormalised; a token is drawn by inverting its cumulative sum (in float64) at one uniform number of the row's own
    generator. At temperature 0 the most likely token is taken, and its logprob is that of softmax(logits), as vLLM
    reports it.
    """
    logits = logits.float()
    temperatures = [s.temperature for s in sampling]
    if any(t not in (0.0, 1.0) for t in temperatures):
        logits = logits / torch.tensor([t or 1.0 for t in temperatures]).unsqueeze(1)
    cut = [row for row, s in enumerate(sampling) if s.truncated]
    if cut:
        logits = logits.clone()
        logits[cut] = _truncate(logits[cut], [sampling[row] for row in cut])
    logprobs = torch.log_softmax(logits, dim=-1)
    greedy = [row for row, t in enumerate(temperatures) if t == 0.0]
    if len(greedy) == len(sampling):
        tokens = logits.argmax(dim=-1)
    else:
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        # Never 1: the last token with any probability is the last that can be drawn.
        uniform = torch.tensor([random.random() * (1 - 2**-40) for random in noise], dtype=torch.float64)
        point = uniform.unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
        if greedy:
            tokens[greedy] = logits[greedy].argmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    asked = [row for row, s in enumerate(sampling) if s.alternatives]
    alternatives: dict[int, list[tuple[int, float]]] = {}
    if asked:
        top = logprobs[asked].topk(max(sampling[row].alternatives for row in asked), dim=-1)
        for row, ids, values in zip(asked, top.indices.tolist(), top.values.tolist(), strict=True):
            count = sampling[row].alternatives
            pairs = zip(ids[:count], values[:count], strict=True)
            alternatives[row] = [(token, value) for token, value in pairs if value > -math.inf]
    return Drawn(tokens=tokens.tolist(), logprobs=chosen.tolist(), alternatives=alternatives)


def _truncate(logits: torch.Tensor, sampling: AbstractSequence[Sampling]) -> torch.Tensor:
    """Set to -inf what top_k and top_p cut off; ties are kept in order of the token id. logits: [B, V]."""
    ordered, indices = logits.sort(dim=-1, descending=True, stable=True)
    vocabulary = logits.shape[1]
    kept = torch.tensor([min(s.top_k or vocabulary, vocabulary) for s in sampling]).unsqueeze(1)
    ordered = ordered.masked_fill(torch.arange(vocabulary).unsqueeze(0) >= kept, -math.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = torch.tensor([s.top_p for s in sampling]).unsqueeze(1)
    cut = before >= top_p
    cut[:, 0] = False
    ordered = ordered.masked_fill(cut, -math.inf)
    return torch.full_like(logits, -math.inf).scatter_(1, indices, ordered)
