"""Since when a scorer has answered nobody, as those who ask it tell each other: whoever comes later need not wait out
the same outage. Pure: times are given, in seconds of one clock."""

from __future__ import annotations

import math


class Outage:
    """Begins when nobody has had an answer for `seconds`, and ends with the first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answered_at = -math.inf
        self._since: float | None = None
        self._waited_out_from = -math.inf
        self.problem = ""
        """Of the last who had no answer."""

    def answered(self, now: float) -> None:
        """Somebody had an answer, whatever it says."""
        self._answered_at, self._since, self._waited_out_from = now, None, -math.inf

    def unanswered(self, began: float, problem: str) -> None:
        """Somebody who asked at `began` had none."""
        if self._since is None:
            self._since = max(began, self._answered_at)
        self.problem = problem

    def waited_out(self, began: float) -> None:
        """Somebody who had the turn at `began` has waited for all of the time that there is."""
        if began > self._answered_at:
            self._waited_out_from = max(began, self._waited_out_from)

    def lasts(self, now: float) -> float | None:
        """For how long nobody has had an answer, if that is an outage: whoever asks in it asks once."""
        if self._since is None or now - self._since < self._seconds:
            return None
        return now - self._since

    def was_waited_out(self, came: float, now: float) -> bool:
        """Whether somebody has waited in vain who began after `came`: who has been there as long need not ask as well.

        A scorer that accepts and then says nothing takes all of the time of each who asks.
        """
        return self.lasts(now) is not None and came < self._waited_out_from
