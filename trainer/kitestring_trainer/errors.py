"""How a run ends other than by success."""

from __future__ import annotations

from kitestring_api.errors import UserMistakeError

__all__ = ["ReplacedError", "RunFailedError", "RunStoppedError", "UserMistakeError"]


class RunFailedError(Exception):
    """The run cannot go on for a reason that is no bug of ours: its status becomes Failed with `reason` and message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReplacedError(RunFailedError):
    """Another process is the run's trainer now: this one leaves all of the run as it is."""

    def __init__(self, message: str) -> None:
        super().__init__("AlreadyReplaced", f"{message}; this process of the trainer has been replaced and ends")


class RunStoppedError(Exception):
    """The run was asked to stop (SIGTERM); it goes on from its last resumable state with `--resume`."""
