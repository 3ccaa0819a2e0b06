"""A stop must be heard whatever the main thread does, and whichever thread the system hands the signal to."""

import os
import signal
import threading
from typing import Any

import pytest

from kitestring_trainer import stop_signals


@pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
def test_a_signal_that_another_thread_takes_ends_a_wait_of_the_main_thread(number: signal.Signals) -> None:
    """A handler would run after the wait, which only the handler ends."""
    lock = threading.Lock()
    lock.acquire()
    taker = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), number))
    with stop_signals.heard(lock.release):
        taker.start()
        assert lock.acquire(timeout=30)
        taker.join()


def test_a_stop_may_set_the_event_for_which_the_main_thread_waits() -> None:
    for _ in range(200):
        event = threading.Event()
        with stop_signals.heard(event.set):
            os.kill(os.getpid(), signal.SIGTERM)
            assert event.wait(timeout=30)


def test_a_signal_that_comes_as_soon_as_it_is_taken_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    event = threading.Event()
    take = signal.signal

    def take_and_get(number: int, handler: Any) -> Any:
        before = take(number, handler)
        if callable(handler) and handler is not signal.default_int_handler:
            os.kill(os.getpid(), number)
        return before

    monkeypatch.setattr(signal, "signal", take_and_get)
    with stop_signals.heard(event.set):
        assert event.wait(timeout=5)


def test_every_signal_is_told_and_no_other() -> None:
    heard: list[str] = []
    both = threading.Event()

    def stop() -> None:
        heard.append(threading.current_thread().name)
        if len(heard) == 2:
            both.set()

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with stop_signals.heard(stop):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            assert both.wait(timeout=30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == ["stop signals"] * 2


def test_handlers_and_the_wake_up_descriptor_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in stop_signals.STOP_SIGNALS}
    with stop_signals.heard(lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in stop_signals.STOP_SIGNALS} == before
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    assert descriptor == -1


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside: list[object] = []

    def elsewhere() -> None:
        with stop_signals.heard(lambda: None):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert inside == [before]
