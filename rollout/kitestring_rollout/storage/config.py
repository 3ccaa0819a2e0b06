"""Where a run's objects lie, as written in the config file of each process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kitestring_rollout.storage.keys import check_prefix


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DirectoryStoreConfig(_Config):
    kind: Literal["directory"]
    path: Path


class S3StoreConfig(_Config):
    kind: Literal["s3"]
    endpoint: str = Field(description="host:port or host, without scheme", pattern=r"^[A-Za-z0-9.\-\[\]:]+$")
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    prefix: str = Field(default="", description="of the run, without a slash at its ends")
    region: str = "us-east-1"
    secure: bool = Field(default=True, description="HTTPS")
    access_key_file: Path
    secret_key_file: Path
    connections: int = Field(default=32, gt=0, le=256, description="kept open at most, and requests in flight at most")
    timeout_seconds: float = Field(default=10.0, gt=0, description="of connecting, and of waiting for bytes")

    @field_validator("prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        return check_prefix(value.strip("/"))


StoreConfig: TypeAlias = Annotated[DirectoryStoreConfig | S3StoreConfig, Field(discriminator="kind")]
