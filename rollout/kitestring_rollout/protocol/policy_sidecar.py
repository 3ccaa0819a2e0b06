"""What the trainer says to the sidecar of a policy server (`names.ROUTE_SIDECAR_WEIGHTS`, bearer credential).

Errors are `ProtocolError`s. Reasons: Unauthorized (401), InvalidBody (400), UnknownVersion (404: not in storage),
NotCurrent (409: `current.json` names another), WeightsTorn (422: differs from its manifest), ServerRefused (422: the
server does not take these weights), ServerAway, StoreUnavailable (503).
"""

from __future__ import annotations

from typing import Final

from pydantic import Field

from kitestring_rollout.protocol.gateway_admin import Message

REASON_WEIGHTS_TORN: Final = "WeightsTorn"


class LoadWeights(Message):
    """POST: fetch, verify and serve the version. Answered when it is served, at once when it is already."""

    version: str = Field(min_length=1)


class LoadedWeights(Message):
    version: str
    epoch: str = Field(description="of the server's process: another one after each restart")


class ServedWeights(Message):
    """GET: what is served now."""

    version: str | None = Field(description="None: the server is away, or loading")
    epoch: str | None = Field(description="of the server's process; None: it is away")
    current: str | None = Field(description="what `current.json` named when it was last read")
