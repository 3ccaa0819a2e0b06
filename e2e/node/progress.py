"""Plain lines that say what is being done, and how long each step took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

STARTED: Final = time.monotonic()
_lock = threading.Lock()


def say(text: str) -> None:
    """One line with the seconds since the command began."""
    with _lock:
        print(f"e2e {time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Say that a step begins, and when it is done how long it took."""
    say(f"{name} …")
    began = time.monotonic()
    yield
    say(f"{name}: done in {time.monotonic() - began:.1f} s")
