"""Config file of `kitestring collector`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from kitestring_rollout.storage import StoreConfig


class Listener(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = any free port")


class CollectorConfig(BaseModel):
    """`kitestring collector --config FILE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: Listener = Listener()
    store: StoreConfig
    credential_file: Path = Field(description="bearer credential of gateways: their spans go below traces/")
    agent_credential_file: Path | None = Field(
        default=None,
        description="bearer credential for agents' spans, which go below agent/; without it none are taken",
    )
    max_request_bytes: int = Field(default=64 << 20, gt=0, description="of a request, before and after decompression")
    max_pending_bytes: int = Field(default=512 << 20, gt=0, description="of requests that are being read and stored")
    write_threads: int = Field(default=16, gt=0, le=256, description="objects written at once")
    body_seconds: float = Field(default=60.0, gt=0, description="a request whose body takes longer is given up")
    retry_after_seconds: int = Field(default=1, gt=0, description="what a client is told while the store is away")
