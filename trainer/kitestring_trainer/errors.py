"""How a run ends other than by success."""

from __future__ import annotations

from kitestring_api.errors import UserMistakeError

__all__ = ["ReplacedError", "RunFailedError", "RunStoppedError", "UserMistakeError"]


class RunFailedError(Exception):
    """This process of the trainer cannot go on, and that is no bug of ours: it ends Failed, with `reason` and message.

    `restart_helps`: what surrounds the trainer failed, not the run; a trainer that is started anew may go on.
    """

    def __init__(self, reason: str, message: str, *, restart_helps: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.restart_helps = restart_helps


class ReplacedError(RunFailedError):
    """Another process is the run's trainer now: this one leaves all of the run as it is."""

    def __init__(self, message: str) -> None:
        super().__init__(
            "AlreadyReplaced",
            f"{message}; this process of the trainer has been replaced and ends",
            restart_helps=True,
        )


class RunStoppedError(Exception):
    """The run was asked to stop (SIGTERM); it goes on from its last resumable state with `--resume`."""
