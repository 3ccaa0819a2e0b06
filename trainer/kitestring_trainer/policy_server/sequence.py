"""One sequence being generated, shared by the engine's thread (writes) and the server's (reads what is published)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from kitestring_trainer.policy_server.detokenize import TextStream
from kitestring_trainer.policy_server.sampling import Sampling

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False)
class GeneratedSequence:
    """What to generate, and what has been generated.

    The engine appends to the lists and then raises `published`; readers on other threads look at entries below
    `published` only. Once `finish_reason` is set nothing changes any more.
    """

    prompt: list[int]
    sampling: Sampling
    noise: Random
    max_tokens: int
    stop_tokens: Mapping[int, int | None]
    """Tokens that end the sequence -> the stop_reason to report: None for the model's own end of text. The token is
    in `tokens`, not in the text.
    """
    text: TextStream | None
    """Makes text while generating: needed for streaming and for stop strings."""
    notify: Callable[[], None]
    """Called on the server's thread after news: at the end, and after every step while `live`."""
    live: bool
    index: int = 0
    """Choice index within its request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per token, when sampling.alternatives > 0."""
    texts: list[str] = field(default_factory=list)
    """Per token, when `text` is there: the text released at that token."""
    tail: str = ""
    """The text released at the end, after all tokens."""
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first token it generated), in order."""
    published: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token of the request, that ended it; None for the model's own end of text."""
    first_token_at: float | None = None
    """time.monotonic() of the first token."""
    cancelled: bool = False
    """Set by the server: nobody waits for it any more."""

    @property
    def length(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.prompt) + len(self.tokens)

    def version_spans(self) -> list[dict[str, object]]:
        """vLLM's weight_versions: `[{"version", "start", "end"}]` over the reply's tokens, without gaps."""
        ends = [start for _, start in self.versions[1:]] + [len(self.tokens)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self.versions, ends, strict=True)
        ]
