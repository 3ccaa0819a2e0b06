"""Retries of clients: a repeated request is answered from the call that it repeats, under that call's number. Pure but
for the futures that joiners wait on.

A request repeats a call when it carries that call's idempotency key, or when its client says that it is a retry and its
body equals that of the latest call with this body. Otherwise equal bodies are two samples. A call that failed or was
cancelled has nothing to repeat: its retry is a new call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from kitestring_rollout.gateway.errors import Refusal

BodyKey = tuple[str, int, int]
"""Path, length and hash of a request's body. The hash is Python's own, keyed per process; who could make two bodies of
one attempt collide would repeat their own calls, nobody else's."""


def body_key(path: str, body: bytes) -> BodyKey:
    return (path, len(body), hash(body))


@dataclass(slots=True)
class Answer:
    """What an agent got, or would have got, for a call."""

    head: bytes
    """Start of the response, without length."""
    body: bytes


@dataclass(slots=True, eq=False)
class Entry:
    """A call that a request may repeat."""

    seq: int
    key: BodyKey
    idempotency: str | None
    answer: Answer | None = None
    delivered: bool = False
    running: bool = True
    _joined: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until the call is no longer in flight."""
        if self.running:
            if self._joined is None:
                self._joined = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._joined)

    def stop(self, answer: Answer | None) -> None:
        """The call is over; joiners go on with its answer, or without."""
        self.running = False
        self.answer = answer
        if self._joined is not None and not self._joined.done():
            self._joined.set_result(None)


@dataclass(slots=True)
class Recent:
    """The repeatable calls of one attempt."""

    by_body: dict[BodyKey, Entry] = field(default_factory=dict)
    by_idempotency: dict[str, Entry] = field(default_factory=dict)
    kept: set[Entry] = field(default_factory=set)
    """Those whose answer is kept, also where a later call took the place in the tables."""

    def find(self, key: BodyKey, idempotency: str | None, is_retry: bool) -> Entry | None:
        """The call that a request repeats; Refusal 422 when its idempotency key came with another body."""
        if idempotency is not None:
            entry = self.by_idempotency.get(idempotency)
            if entry is not None and entry.key != key:
                raise Refusal(
                    422, "idempotency_key_reused", "the idempotency key was used for another request of the attempt"
                )
            return entry
        return self.by_body.get(key) if is_retry else None

    def add(self, entry: Entry) -> None:
        self.by_body[entry.key] = entry
        if entry.idempotency is not None:
            self.by_idempotency[entry.idempotency] = entry

    def forget(self, entry: Entry) -> None:
        if self.by_body.get(entry.key) is entry:
            del self.by_body[entry.key]
        if entry.idempotency is not None and self.by_idempotency.get(entry.idempotency) is entry:
            del self.by_idempotency[entry.idempotency]


class ReplayMemory:
    """Bounds the memory of kept answers over all attempts: the oldest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._kept: OrderedDict[Entry, Recent] = OrderedDict()
        self.size = 0

    def keep(self, entry: Entry, recent: Recent) -> None:
        if entry.answer is None:
            return
        self._kept[entry] = recent
        recent.kept.add(entry)
        self.size += len(entry.answer.body)
        while self.size > self._max:
            oldest, owner = next(iter(self._kept.items()))
            owner.forget(oldest)
            self._drop(oldest, owner)

    def drop_all(self, recent: Recent) -> None:
        """Of an attempt that is closed."""
        for entry in tuple(recent.kept):
            self._drop(entry, recent)

    def _drop(self, entry: Entry, recent: Recent) -> None:
        del self._kept[entry]
        recent.kept.discard(entry)
        if entry.answer is not None:
            self.size -= len(entry.answer.body)
