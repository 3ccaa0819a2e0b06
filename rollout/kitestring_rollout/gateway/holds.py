"""Weight updates: calls to a held policy wait at its gate until it is released, for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable


class Gate:
    """The gate of one policy. Counts the calls behind it (generating) and before it (held)."""

    def __init__(self) -> None:
        self.generating = 0
        self.waiting = 0
        self._opened: asyncio.Event | None = None
        self._until = 0.0
        self._idle: asyncio.Event | None = None

    @property
    def held(self) -> bool:
        return self._opened is not None

    async def enter(self) -> None:
        """Waits while the policy is held; past the hold's bound the call goes on, and the server queues it."""
        while self._opened is not None and (left := self._until - time.monotonic()) > 0:
            self.waiting += 1
            try:
                async with asyncio.timeout(left):
                    await self._opened.wait()
            except TimeoutError:
                continue  # unless the hold was renewed meanwhile, its bound has come
            finally:
                self.waiting -= 1
        self.generating += 1

    def leave(self) -> None:
        self.generating -= 1
        if self._idle is not None and self.generating == 0:
            self._idle.set()

    async def hold(self, drain_seconds: float, hold_seconds: float) -> int:
        """Closes the gate for at most `hold_seconds` and waits for calls behind it to end; how many have not."""
        if self._opened is None:
            self._opened = asyncio.Event()
        self._until = time.monotonic() + hold_seconds
        if self.generating and drain_seconds > 0:
            if self._idle is None:
                self._idle = asyncio.Event()
            self._idle.clear()
            try:
                async with asyncio.timeout(drain_seconds):
                    await self._idle.wait()
            except TimeoutError:
                pass
        return self.generating

    def release(self) -> None:
        if self._opened is not None:
            self._opened.set()
            self._opened = None


class Gates:
    """One gate per trained policy."""

    def __init__(self, policies: Iterable[str]) -> None:
        self._gates = {name: Gate() for name in policies}

    def find(self, policy: str) -> Gate | None:
        return self._gates.get(policy)

    @property
    def waiting(self) -> int:
        return sum(gate.waiting for gate in self._gates.values())
