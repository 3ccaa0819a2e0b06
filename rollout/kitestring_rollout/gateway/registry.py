"""The attempts of this gateway process: open ones by id, and what is remembered of closed ones."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from kitestring_rollout.gateway.session import Session
from kitestring_rollout.gateway.token import fingerprint
from kitestring_rollout.protocol.gateway_admin import EndAttempt, EndedAttempt, FencedAttempt

REMEMBERED = 65_536


class Closed:
    """An ended attempt: enough to answer the same question the same way. Texts of its agent are not kept, they would
    take the memory of REMEMBERED attempts: of the end only a digest, of the fence all but the last message."""

    __slots__ = ("_end", "ended", "fenced")

    def __init__(self, fenced: FencedAttempt, end: EndAttempt, ended: EndedAttempt) -> None:
        self.fenced = fenced.model_copy(update={"last_message": None}).model_dump_json()
        self.ended = ended.model_dump_json()
        self._end = _digest(end)

    def ended_with(self, end: EndAttempt) -> bool:
        return self._end == _digest(end)


def _digest(end: EndAttempt) -> bytes:
    return hashlib.sha256(end.model_dump_json().encode()).digest()


class Registry:
    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._empty = asyncio.Event()
        self._empty.set()

    async def until_empty(self) -> None:
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._open.values()))

    def open(self, session: Session) -> None:
        self._open[session.identity.attempt] = session
        self._empty.clear()
        self._by_token[fingerprint(session.token)] = session

    def find_token(self, token: str) -> Session | None:
        """The open attempt of a token that this process signed; spares the signature's check."""
        return self._by_token.get(fingerprint(token))

    def find(self, attempt: str) -> Session | None:
        return self._open.get(attempt)

    def closed(self, attempt: str) -> Closed | None:
        return self._closed.get(attempt)

    def close(self, attempt: str, closed: Closed) -> None:
        self.drop(attempt)
        self._closed[attempt] = closed
        while len(self._closed) > REMEMBERED:
            self._closed.popitem(last=False)

    def drop(self, attempt: str) -> None:
        session = self._open.pop(attempt, None)
        if session is not None:
            del self._by_token[fingerprint(session.token)]
        if not self._open:
            self._empty.set()
