"""The run's state as others see it: GET /run/v1/status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kitestring_rollout.protocol.run_status import RolloutCounts, RunStatus


class StatusBoard:
    """The current RunStatus; written by the trainer's threads, read by the queue's."""

    def __init__(self, run: str, steps: int, counts: Callable[[RolloutCounts], RolloutCounts]) -> None:
        """`counts` completes the counters with those of the plan in progress."""
        self._lock = threading.Lock()
        self._counts = counts
        self._status = RunStatus(run=run, phase="Starting", step=0, steps=steps, incarnation=0, unix_time=time.time())

    def update(self, **fields: Any) -> None:
        """Set fields of RunStatus."""
        with self._lock:
            self._status = self._status.model_copy(update=fields)

    def snapshot(self) -> RunStatus:
        with self._lock:
            status = self._status
        return status.model_copy(update={"rollouts": self._counts(status.rollouts), "unix_time": time.time()})
