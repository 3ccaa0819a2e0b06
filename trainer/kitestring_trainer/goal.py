"""How many steps a run makes: wanted from outside at any time, taken up between two steps."""

from __future__ import annotations

import threading


class StepsRefusedError(Exception):
    """The run cannot end after so many steps any more."""


class StepGoal:
    """Safe to use from several threads. A step that has begun is made; the run never ends in the middle of one."""

    def __init__(self, steps: int, made: int) -> None:
        """`made` steps are made already: by earlier processes of the run."""
        self._lock = threading.Lock()
        self._wanted = steps
        self._made = made
        self._begun = made if made >= steps else made + 1
        self._ended = made >= steps

    @property
    def steps(self) -> int:
        """The run ends after this step; not below the step in progress."""
        with self._lock:
            return max(self._wanted, self._begun)

    def want(self, steps: int) -> None:
        """Have the run end after `steps`, or after the step in progress where that is later.

        Raises StepsRefusedError when more are made already, or the last step is over and only its end is being seen to.
        """
        with self._lock:
            if steps == self._wanted:
                return
            if steps < self._made:
                raise StepsRefusedError(f"{self._made} steps are made already: steps cannot be {steps}")
            if self._ended:
                raise StepsRefusedError(f"the run is ending after step {self._made}: steps cannot be {steps} any more")
            self._wanted = steps

    def settle(self, step: int) -> bool:
        """`step` is made. Whether it was the last; from now on nothing changes that."""
        with self._lock:
            self._made = step
            self._ended = step >= self._wanted
            self._begun = step if self._ended else step + 1
            return self._ended
