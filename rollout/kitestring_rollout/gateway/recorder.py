"""Records of finished calls, made and encoded many at a time.

The agent has its reply by then, and nobody waits. One after the other, records cost less than half of what they cost
between the requests of a busy process, whose code and data push the encoder's out of the processor's caches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from kitestring_rollout.gateway.call import Call
from kitestring_rollout.traces.records import Outcome

GATHER_SECONDS: Final = 0.01
AT_ONCE: Final = 16
"""So many records are made before the loop turns to requests again."""


class Recorder:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Call, Outcome]] = deque()
        self._scheduled: asyncio.Handle | None = None

    def add(self, call: Call, outcome: Outcome) -> None:
        """A call is over; its record is made soon, or at the next `flush`."""
        self._waiting.append((call, outcome))
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._some)

    def flush(self) -> None:
        """Makes every record that waits."""
        while self._waiting:
            self._one()

    def _some(self) -> None:
        self._scheduled = None
        for _ in range(min(AT_ONCE, len(self._waiting))):
            self._one()
        if self._waiting:
            self._scheduled = asyncio.get_running_loop().call_soon(self._some)

    def _one(self) -> None:
        call, outcome = self._waiting.popleft()
        settle(call, outcome)


def settle(call: Call, outcome: Outcome, *, waits: bool = False) -> None:
    """Makes the record of a call that has left. It never fails: others' calls are recorded in the same turn. One
    that waits for a retry is kept until it has been delivered, or the fence."""
    session = call.session
    try:
        record = call.record(outcome)
    except Exception as bug:  # noqa: BLE001
        session.fail_to_record(call.seq, outcome, bug, nonconforming=bool(call.prepared.nonconforming))
        return
    if waits:
        session.undelivered[call.seq] = record
    else:
        session.record(record)
