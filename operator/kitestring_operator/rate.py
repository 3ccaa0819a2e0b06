"""A rate that is not exceeded: a bucket of tokens, at most one second's worth."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """`per_second` tokens a second; those of one second may be taken at once."""

    def __init__(self, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._most = max(per_second, 1.0)
        self._now = now
        self._tokens = self._most
        self._at = now()

    def take(self) -> bool:
        """Take a token, if there is one."""
        now = self._now()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def wait_seconds(self) -> float:
        """Until there is a token again."""
        return max(0.0, (1.0 - self._tokens) / self._per_second)
