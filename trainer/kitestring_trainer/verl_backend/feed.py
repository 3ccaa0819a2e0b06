"""Waits for a step's rollouts on a thread of its own, so that a stop or a dead process is noticed meanwhile."""

from __future__ import annotations

import threading

from kitestring_trainer.learner import StepBatch, StepSource


class StopRequestedError(Exception):
    """`request_stop` was called while a step had not begun to train."""


class RolloutFeed:
    """One step at a time: `begin` asks the source, `take` waits for its answer."""

    def __init__(self, source: StepSource) -> None:
        self.source = source
        self._changed = threading.Condition()
        self._answers: dict[int, StepBatch | BaseException] = {}
        self._stop = False

    def begin(self, step: int) -> None:
        threading.Thread(target=self._ask, args=(step,), name=f"rollouts-of-step-{step}", daemon=True).start()

    def _ask(self, step: int) -> None:
        answer: StepBatch | BaseException
        try:
            answer = self.source.step_batch(step)
        except BaseException as error:  # noqa: BLE001 - raised again by take(), on the trainer's thread
            answer = error
        with self._changed:
            self._answers[step] = answer
            self._changed.notify_all()

    def take(self, step: int) -> StepBatch:
        """The batch of `step`.

        Raises:
            StopRequestedError: `request_stop` was called before the batch was there, or while it was awaited.
            BaseException: what the source raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stop or step in self._answers)
            if self._stop:
                raise StopRequestedError
            answer = self._answers.pop(step)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def request_stop(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    @property
    def stopping(self) -> bool:
        return self._stop
