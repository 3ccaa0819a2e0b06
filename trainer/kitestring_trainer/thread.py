"""Work in a thread of its own that ends with the process, whatever it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


def in_thread(work: Callable[[], Answer], name: str) -> Future[Answer]:
    """Begin `work`; what it raises comes out of the future."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  the thread's boundary: raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
