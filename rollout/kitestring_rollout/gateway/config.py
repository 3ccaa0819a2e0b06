"""Configuration of a gateway process: plain data, checked here, no effects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

MIN_KEY_BYTES = 32

URL_PATTERN = r"^https?://[^\s/?#]+(/[^\s?#]*)?$"
Url = Annotated[str, StringConstraints(pattern=URL_PATTERN)]
HOSTNAME = "{hostname}"
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Part(BaseModel):
    """A part of the configuration: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Listener(Part):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = any free port")


class TrainedPolicy(Part):
    """A policy that is trained, served by servers with vLLM's routes."""

    name: ModelName
    servers: tuple[Url, ...] = Field(min_length=1, description="base URLs without `/v1`, one per replica")
    served_name: ModelName | None = Field(default=None, description="model name at the servers; default: the name")
    aliases: tuple[ModelName, ...] = ()


class FrozenModel(Part):
    """A model that is used and never trained: any OpenAI-compatible endpoint."""

    name: ModelName
    url: Url = Field(description="OpenAI base URL, with `/v1` where the endpoint has one")
    model: ModelName = Field(description="model name at the endpoint")
    api_key_file: Path | None = None
    aliases: tuple[ModelName, ...] = ()


class Sampling(Part):
    """What the trainer assumes of a training call."""

    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int | None = Field(default=None, gt=0, description="cap of the completion tokens of one call")
    nonconforming: Literal["enforce", "refuse"] = Field(
        default="enforce", description="a call that asks for other sampling: corrected and flagged, or refused (400)"
    )


class Collector(Part):
    """Where spans go: base URL of a collector."""

    url: Url
    credential_file: Path | None = Field(default=None, description="bearer credential of the trusted route")
    agent_url: Url | None = Field(default=None, description="of the untrusted route, where it is another collector")
    agent_credential_file: Path | None = Field(default=None, description="bearer credential of the untrusted route")
    deadline_seconds: float = Field(default=60.0, gt=0, description="a span not acknowledged by then makes it lost")
    max_pending_bytes: int = Field(default=256 * 1024 * 1024, gt=0)


class GatewayConfig(Part):
    """`kitestring gateway --config FILE`."""

    run: str = Field(min_length=1)
    agents: Listener = Listener()
    admin: Listener = Listener()
    advertised_url: Url | None = Field(
        default=None,
        description="of the agents' listener as agents reach it; {hostname} in it is replaced by the host's name; "
        "default: the address it is bound to",
    )
    token_key_file: Path
    admin_credential_file: Path
    policies: tuple[TrainedPolicy, ...] = ()
    frozen: tuple[FrozenModel, ...] = ()
    sampling: Sampling = Sampling()
    collector: Collector
    record_contents: bool = True
    hold_seconds: float = Field(default=120.0, gt=0, description="a held call is forwarded at the latest after this")
    connect_seconds: float = Field(default=2.0, gt=0, description="retries of a refused connection to a model server")
    drain_seconds: float = Field(default=30.0, ge=0, description="wait for open attempts after SIGTERM")
    abandoned_seconds: float = Field(
        default=600.0,
        gt=0,
        description="an attempt that nobody ended is dropped this long after its token expired, or its last fence",
    )
    max_body_bytes: int = Field(default=32 * 1024 * 1024, gt=0, description="of an agent's request")
    bodies_bytes: int = Field(
        default=512 * 1024 * 1024,
        gt=0,
        description="memory for the bodies of all requests in flight, of which an attempt may hold a quarter; 503 "
        "beyond it",
    )
    replay_bytes: int = Field(default=64 * 1024 * 1024, ge=0, description="memory for replies kept for retries")
    media_hosts: tuple[str, ...] = Field(default=(), description="hosts from which remote media URLs are allowed")

    @field_validator("advertised_url")
    @classmethod
    def _only_the_hostname(cls, url: str | None) -> str | None:
        if url is not None and set("{}") & set(url.replace(HOSTNAME, "")):
            raise ValueError(f"{HOSTNAME} is all that may stand in braces")
        return url

    @field_validator("media_hosts")
    @classmethod
    def _lower(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(host.lower() for host in hosts)

    @model_validator(mode="after")
    def _one_body_fits(self) -> GatewayConfig:
        if self.bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"bodies_bytes {self.bodies_bytes} is below max_body_bytes {self.max_body_bytes}: raise the one or "
                "lower the other"
            )
        return self

    @model_validator(mode="after")
    def _names_unique(self) -> GatewayConfig:
        models: list[TrainedPolicy | FrozenModel] = [*self.policies, *self.frozen]
        if not models:
            raise ValueError("policies, frozen: at least one model is needed")
        seen: set[str] = set()
        for model in models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    raise ValueError(f"model name or alias {name!r} is given twice; rename one of them")
                seen.add(name)
        return self
