"""Settings of an installation: the file that the chart mounts into the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from kitestring_api.errors import UserMistakeError
from kitestring_api.v1alpha1.scalars import Bucket, JsonObject, ObjectKey, Token, Url

Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^\S+$")]


class Part(BaseModel):
    """A part of the settings: camelCase in the file, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Images(Part):
    """The image of each part, unless a run names another."""

    operator: Image
    rollout: Image = Field(description="gateway, worker, launcher, sidecar of policy servers, built-in collector")
    trainer: Image
    trainer_gpu: Image | None = Field(default=None, description="with trainer.device: cuda; absent: `trainer`")
    policy_server_cpu: Image
    policy_server_vllm: Image
    collector_contrib: Image


class DefaultStorage(Part):
    """Object storage of runs that name none."""

    bucket: Bucket
    prefix: ObjectKey | None = None
    endpoint: Url | None = None
    region: Token | None = None
    access_key_file: Path
    secret_key_file: Path


class DefaultTemplates(Part):
    """Pod templates laid over ours before the run's own, by part."""

    trainer: JsonObject | None = None
    policy_server: JsonObject | None = None
    gateway: JsonObject | None = None
    collector: JsonObject | None = None
    rollout: JsonObject | None = None
    scorer: JsonObject | None = None


class LeaderElection(Part):
    """Which of several operators acts."""

    enabled: bool = True
    lease_name: Token = "kitestring-operator"
    namespace: Token | None = Field(default=None, description="of the Lease; absent: the operator's own")
    lease_seconds: int = Field(default=15, ge=3, le=300, description="a silent leader loses the Lease after so long")
    renew_seconds: float = Field(default=5.0, gt=0, le=60)


class StorageKeys(BaseModel):
    """Keys of the default storage, as read at the start. They are not printed."""

    model_config = ConfigDict(frozen=True)

    access_key_id: SecretStr
    secret_access_key: SecretStr


class Settings(Part):
    """`kitestring operator --config FILE`."""

    images: Images
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    default_storage: DefaultStorage | None = None
    collector_kind: Literal["contrib", "builtin"] = Field(
        default="builtin", description="of runs that name none: ours, or the stock OpenTelemetry Collector"
    )
    default_templates: DefaultTemplates = DefaultTemplates()
    cluster_domain: str = Field(
        default="", description="appended to the names of Services; empty: the pods' search domains complete them"
    )
    namespaces: tuple[Token, ...] = Field(default=(), description="that are served; empty: all")
    job_creation_per_second: float = Field(default=20.0, gt=0, le=1000, description="Jobs of rollouts, over all runs")
    poll_seconds: float = Field(default=2.0, gt=0, le=60, description="between two questions to a trainer")
    resync_seconds: float = Field(default=60.0, gt=0, le=3600, description="every run is looked at so often")
    leader_election: LeaderElection = LeaderElection()
    storage_keys: StorageKeys | None = Field(
        default=None, exclude=True, description="read from the files of defaultStorage, never from this file"
    )


def load_settings(path: Path) -> Settings:
    """The settings in a YAML or JSON file, with the keys of the default storage. Raises UserMistakeError."""
    data = _parsed(path)
    if "storageKeys" in data or "storage_keys" in data:
        raise UserMistakeError(f"{path}: storageKeys: found a value; keys stand in the files that defaultStorage names")
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserMistakeError(f"{path}: {where or 'file'}: {first['msg']}") from error
    storage = settings.default_storage
    if storage is None:
        return settings
    keys = StorageKeys(
        access_key_id=SecretStr(_secret(storage.access_key_file, "accessKeyFile")),
        secret_access_key=SecretStr(_secret(storage.secret_key_file, "secretKeyFile")),
    )
    return settings.model_copy(update={"storage_keys": keys})


def _parsed(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserMistakeError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserMistakeError(f"{path}: no YAML: {error}") from error
    if not isinstance(data, dict):
        raise UserMistakeError(f"{path}: found {type(data).__name__}; an object with `images` is needed")
    return data


def _secret(path: Path, field: str) -> str:
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise UserMistakeError(f"defaultStorage.{field}: {path}: {error.strerror}") from error
    if not text:
        raise UserMistakeError(f"defaultStorage.{field}: {path} is empty")
    return text
