"""Config file of `kitestring fetch`."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kitestring_rollout.storage import S3StoreConfig
from kitestring_rollout.storage.keys import check_key, check_prefix


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class S3Source(_Config):
    """An object (`key`), or all objects below a prefix (`prefix`)."""

    endpoint: str = Field(description="host:port or host, without scheme")
    bucket: str
    region: str = "us-east-1"
    secure: bool = Field(default=True, description="HTTPS")
    access_key_file: Path
    secret_key_file: Path
    timeout_seconds: float = Field(default=10.0, gt=0)
    key: str | None = Field(default=None, description="of one object, which becomes a file")
    prefix: str | None = Field(default=None, description="of objects that become a folder; empty: the whole bucket")

    @model_validator(mode="after")
    def _one_of_both(self) -> S3Source:
        if (self.key is None) == (self.prefix is None):
            raise ValueError("exactly one of key and prefix is needed")
        if self.key is not None:
            check_key(self.key)
        else:
            check_prefix((self.prefix or "").strip("/"))
        self.store()
        return self

    @property
    def folder(self) -> str:
        """The prefix without slashes at its ends."""
        return (self.prefix or "").strip("/")

    def store(self) -> S3StoreConfig:
        """The bucket, below the prefix where there is one."""
        return S3StoreConfig(
            kind="s3",
            endpoint=self.endpoint,
            bucket=self.bucket,
            prefix=self.folder,
            region=self.region,
            secure=self.secure,
            access_key_file=self.access_key_file,
            secret_key_file=self.secret_key_file,
            timeout_seconds=self.timeout_seconds,
        )


class HuggingFaceSource(_Config):
    """A model of the Hugging Face hub, or of the mirror that the environment variable HF_ENDPOINT names."""

    id: str = Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")
    revision: str | None = Field(default=None, description="branch, tag or commit; absent: the default branch")
    token_file: Path | None = Field(default=None, description="access token")


class Item(_Config):
    """One thing to bring; `to` is a file for an object, else a folder. What is there already is kept."""

    s3: S3Source | None = None
    hugging_face: HuggingFaceSource | None = Field(default=None, alias="huggingFace")
    to: Path

    @field_validator("to")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError(f"{path} is relative; give the whole path")
        return path

    @model_validator(mode="after")
    def _one_source(self) -> Item:
        if (self.s3 is None) == (self.hugging_face is None):
            raise ValueError("exactly one of s3 and huggingFace is needed")
        return self


class FetchConfig(_Config):
    """`kitestring fetch --config FILE`."""

    items: tuple[Item, ...] = ()
    retry_seconds: float = Field(
        default=300.0, ge=0, description="an item whose source is away for so long is given up"
    )
