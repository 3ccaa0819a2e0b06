"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and what they start would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
