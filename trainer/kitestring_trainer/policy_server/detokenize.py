"""Text from tokens, one token at a time, ending at stop strings."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from tokenizers import Tokenizer  # type: ignore[import-untyped]
from tokenizers.decoders import DecodeStream  # type: ignore[import-untyped]


class TextStream:
    """Text of one sequence. Never gives out half a character, nor the beginning of what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, stop: AbstractSequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in self._stop), default=0)
        self._held = ""
        self._pending: list[int] = []

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token; returns the text that is now certain and the stop string that is complete, if one is.

        After a stop string, the text up to it has been given out and nothing more must be pushed.
        """
        self._pending.append(token)
        piece = self._stream.step(self._tokenizer, token)
        if piece is None:
            return "", None
        self._pending.clear()
        self._held += piece
        if not self._stop:
            return self._release(len(self._held)), None
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, text = min(found)
            return self._release(at), text
        return self._release(len(self._held) - self._overlap()), None

    def finish(self) -> str:
        """The text still held back. Bytes that never became a character are replacement characters, as in decode()."""
        rest = self._held
        self._held = ""
        if self._pending:
            rest += self._tokenizer.decode(self._pending, skip_special_tokens=self._skip)
        return rest

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(text.startswith(end) for text in self._stop):
                return size
        return 0

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text
