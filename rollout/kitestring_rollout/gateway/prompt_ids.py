"""The prompt's token ids cut out of a reply's bytes: as a JSON list of Python numbers, the ids of a long prompt would
cost more than all the rest of their call. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from kitestring_rollout.traces.records import TokenIds

MARK: Final = b'"prompt_token_ids":['
"""Cannot stand inside a JSON string: there, the quote before the colon would have a backslash before it."""
WORTHWHILE_BYTES: Final = 4096
CONVERSATIONS: Final = 2
_ID_TEXT: Final = b"0123456789,"
_LARGEST: Final = np.iinfo(np.int32).max


class PromptReader:
    """Reads the prompts of one attempt. A turn's prompt mostly begins with the last turn's, digit for digit: then only
    what is new is read. The last `CONVERSATIONS` long prompts are kept for it."""

    def __init__(self) -> None:
        self._known: list[tuple[bytes, TokenIds]] = []

    def cut(self, reply: bytes) -> tuple[bytes, TokenIds | None]:
        """The reply with every list of prompt ids emptied, and the first of them; the reply itself and None where
        there is nothing to gain, or the list is no plain list of numbers."""
        if len(reply) < WORTHWHILE_BYTES:
            return reply, None
        start = reply.find(MARK)
        if start < 0:
            return reply, None
        rest = []
        ids: TokenIds | None = None
        position = 0
        while start >= 0:
            begin = start + len(MARK)
            end = reply.find(b"]", begin)
            if end < 0:
                return reply, None
            if ids is None:
                ids = self._read(reply[begin:end])
                if ids is None:
                    return reply, None
            rest.append(reply[position:begin])
            position = end
            start = reply.find(MARK, end)
        rest.append(reply[position:])
        return b"".join(rest), ids

    def _read(self, text: bytes) -> TokenIds | None:
        known = self._known
        for place, (begun, first) in enumerate(known):
            if text.startswith(begun) and text[len(begun) : len(begun) + 1] in (b"", b","):
                more = read_ids(text[len(begun) + 1 :]) if len(text) > len(begun) else first[:0]
                if more is None:
                    return None
                ids = np.concatenate((first, more)) if len(more) else first
                del known[place]
                break
        else:
            found = read_ids(text)
            if found is None:
                return None
            ids = found
            del known[CONVERSATIONS - 1 :]
        known.insert(0, (text, ids))
        return ids


def read_ids(text: bytes) -> TokenIds | None:
    """int32 [P] of numbers with commas between them; None for anything else."""
    if text.translate(None, _ID_TEXT):
        return None
    try:
        values = np.fromstring(text, dtype=np.int64, sep=",")
    except ValueError:
        return None
    if len(values) != text.count(b",") + 1 or values.max() > _LARGEST:
        return None
    return values.astype(np.int32)
