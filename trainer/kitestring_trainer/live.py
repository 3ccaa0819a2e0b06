"""What may change while a run goes on: PUT /run/v1/live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field, StringConstraints

from kitestring_rollout.protocol.gateway_admin import Message

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")]


class LiveChange(Message):
    """PUT /run/v1/live. Absent fields stay as they are; the same again changes nothing. 409 for what cannot change."""

    steps: int | None = Field(
        default=None,
        ge=1,
        description="the run ends after this step, not in a step's middle. A learning rate whose course has a length "
        "(none by default) keeps the length that it had when the trainer started",
    )
    policy_servers: tuple[Url, ...] | None = Field(
        default=None, min_length=1, description="base URLs without /v1 of all servers of the trained policy"
    )
    gateways: tuple[Url, ...] | None = Field(
        default=None, min_length=1, description="admin URLs of all gateway processes"
    )


class LiveState(Message):
    """The answer: what is in effect now."""

    steps: int = Field(description="never below the step in progress")
    policy_servers: tuple[str, ...] = Field(description="those that gateways are told to send calls to")
    policy_servers_joining: tuple[str, ...] = Field(description="those that are being given the current weights")
    gateways: tuple[str, ...] = Field(description="those that open attempts")
    gateways_leaving: tuple[str, ...] = Field(description="those that open no more, and still hold attempts")


class LiveRefusedError(Exception):
    """The change cannot be made; `reason` is one word for a program."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Change = Callable[[LiveChange], LiveState]


def no_change(_: LiveChange) -> LiveState:
    """Of what is no run: a single rollout that is tried."""
    raise LiveRefusedError("NoRun", "nothing of this can change while it goes on")
