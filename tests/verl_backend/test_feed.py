"""Waiting for a step's rollouts: what comes, what fails, and a stop meanwhile."""

import os
import signal
import threading

import pytest

from kitestring_trainer.learner import StepBatch
from kitestring_trainer.verl_backend.feed import RolloutFeed, StopRequestedError


class Source:
    """Answers when it is told to."""

    def __init__(self, answer=None):
        self.asked, self.go = threading.Event(), threading.Event()
        self._answer = answer

    def step_batch(self, step):
        self.asked.set()
        self.go.wait(30)
        if isinstance(self._answer, BaseException):
            raise self._answer
        return StepBatch(step, (), 1)


def test_a_batch_is_handed_over():
    source = Source()
    feed = RolloutFeed(source)
    feed.begin(3)
    assert source.asked.wait(30)
    source.go.set()
    assert feed.take(3) == StepBatch(3, (), 1)


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()])
def test_what_the_source_raises_is_raised_to_the_trainer(error):
    source = Source(error)
    source.go.set()
    feed = RolloutFeed(source)
    feed.begin(1)
    with pytest.raises(type(error)):
        feed.take(1)


def test_a_stop_while_waiting_from_a_signal_handler():
    source = Source()
    feed = RolloutFeed(source)
    previous = signal.signal(signal.SIGUSR1, lambda *_: feed.request_stop())
    try:
        feed.begin(1)
        assert source.asked.wait(30)
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(StopRequestedError):
            feed.take(1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
        source.go.set()


def test_a_stop_goes_before_a_batch_that_is_there():
    source = Source()
    source.go.set()
    feed = RolloutFeed(source)
    feed.begin(1)
    feed.take(1)
    feed.begin(2)
    feed.request_stop()
    with pytest.raises(StopRequestedError):
        feed.take(2)
