"""How a run ends other than by success."""

from __future__ import annotations


class UserMistakeError(Exception):
    """The user can mend it: shown as one line without a traceback, exit code 2.

    The message names the file or field, what was found, what is allowed, and the remedy.
    """


class RunFailedError(Exception):
    """The run cannot go on for a reason that is no bug of ours: its status becomes Failed with `reason` and message."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RunStoppedError(Exception):
    """The run was asked to stop (SIGTERM); it goes on from its last resumable state with `--resume`."""
