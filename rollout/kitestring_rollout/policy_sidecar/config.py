"""Config file of `kitestring policy-sidecar`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from kitestring_rollout.storage import StoreConfig

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+$")]


class Listener(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = any free port")


class PolicySidecarConfig(BaseModel):
    """`kitestring policy-sidecar --config FILE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: Listener = Listener()
    server: Url = Field(description="base URL of the policy server, without /v1; on the pod's loopback interface")
    store: StoreConfig = Field(description="of the run: its weights/ is read")
    folder: Path = Field(
        description="versions are kept in it, and the link `initial` on which the server starts; the same path in the "
        "server's container"
    )
    credential_file: Path = Field(description="bearer credential of the trainer, for the weights routes")
    poll_seconds: float = Field(default=2.0, gt=0, description="between two looks at the server and at current.json")
    takeover_seconds: float = Field(
        default=15.0,
        ge=0,
        description="a new current version that the trainer has not told of for so long is loaded all the same",
    )
    load_seconds: float = Field(default=1800.0, gt=0, description="for loading a version into the server")
    max_body_bytes: int = Field(default=64 << 20, gt=0, description="of an inference request")
