"""SIGTERM and SIGINT, heard in a thread of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def heard(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop`, once per signal, in a thread. Only a main thread can take signals: outside
    it this does nothing.

    Python runs a signal's handler in the main thread, when this next executes bytecode. A main thread that waits
    for a lock does not when the system hands the signal to another thread, or just before the wait begins: it
    would hear of the signal after the wait. And a handler that sets an event deadlocks with a main thread that is
    about to wait for it. So the interpreter's wake-up descriptor, which is written at once and from any thread,
    wakes one for this alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while received := os.read(reading, 64):
            for number in received:
                if number in STOP_SIGNALS:
                    stop()

    listener = threading.Thread(target=listen, name="stop signals", daemon=True)
    listener.start()
    # the descriptor before the handlers, and after them: no signal finds a handler that tells nobody
    descriptor = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        os.close(writing)
        listener.join()
        os.close(reading)
