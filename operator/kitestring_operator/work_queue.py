"""Which resources are to be looked at, and when: each once, however often it was said; failures after growing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

FIRST_WAIT_SECONDS: Final = 0.5
"""After the first failure; doubled with each."""
LONGEST_WAIT_SECONDS: Final = 60.0

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """Keys to be worked on, in the order of their first mention. A key is never given out twice at once.

    A key that is added while it is worked on is given out again afterwards. It belongs to one event loop.
    """

    def __init__(self, on_length: Callable[[int], None] | None = None) -> None:
        self._waiting: dict[Key, None] = {}
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._ready = asyncio.Event()
        self._on_length = on_length

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Work on `key` soon; nothing changes where it waits already."""
        if key in self._working:
            self._again.add(key)
            return
        self._waiting.setdefault(key)
        self._changed()

    def add_after(self, key: Key, seconds: float) -> None:
        """Work on `key` after so many seconds; the earliest of several such times counts."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(when, self._expire, key)

    async def get(self) -> Key:
        """The next key; `done` must follow."""
        while not self._waiting:
            self._ready.clear()
            await self._ready.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._working.add(key)
        self._changed()
        return key

    def done(self, key: Key) -> None:
        """The work on `key` is over, well or not."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def retry(self, key: Key) -> float:
        """The work failed: try again after a wait that grows with each failure in a row. The wait in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = min(FIRST_WAIT_SECONDS * 2.0 ** min(failures, 16), LONGEST_WAIT_SECONDS)
        self.add_after(key, wait)
        return wait

    def succeeded(self, key: Key) -> None:
        """The work went well: the next failure is a first one."""
        self._failures.pop(key, None)

    def forget(self, key: Key) -> None:
        """There is no such resource any more."""
        self._failures.pop(key, None)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _changed(self) -> None:
        if self._waiting:
            self._ready.set()
        if self._on_length is not None:
            self._on_length(len(self._waiting))
