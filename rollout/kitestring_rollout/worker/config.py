"""Configuration of a worker: plain data, checked here, no effects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from kitestring_api.v1alpha1.agent_protocol import AgentProtocol

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")]
_VARIABLE = re.compile(r"[^=\0]+")


class Part(BaseModel):
    """A part of the configuration: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Listener(Part):
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 = any free port")


class AgentCommand(Part):
    """What runs for each rollout: the pool's container `agent`, on this machine or where the launcher is."""

    command: tuple[str, ...] = Field(min_length=1, description="program and arguments; the program is found in PATH")
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(
        default_factory=dict,
        description="literal variables; PATH, HOME, TMPDIR and LANG may be replaced, what Kitestring says may not. "
        "With launcher_socket they lie over those of the launcher's container",
    )
    env_files: dict[str, Path] = Field(default_factory=dict, description="variables whose value is read from a file")
    working_dir: Path | None = Field(
        default=None,
        description="default: the scratch folder of the attempt; with launcher_socket the folder in which the "
        "launcher was started, which is the image's",
    )

    @field_validator("env", "env_files")
    @classmethod
    def _variables(cls, variables: dict[str, object]) -> dict[str, object]:
        for name in variables:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of an environment variable")
        return variables


class AgentLimits(Part):
    """What one attempt may use on this machine. The first three hold for each of its processes, by RLIMIT.

    Memory is RLIMIT_DATA, not RLIMIT_AS: runtimes such as V8, Go and the JVM reserve address space by the terabyte and
    never touch it; what counts is what is private and writable.
    """

    log_bytes: int = Field(default=1_048_576, ge=0, description="kept of what the agent prints; the queue gets 64 KiB")
    cpu_seconds: int | None = Field(default=None, ge=1)
    memory_bytes: int | None = Field(default=None, ge=1)
    file_bytes: int = Field(default=4 * 1024**3, ge=1, description="of each file that the agent writes")
    processes: int | None = Field(
        default=None, ge=1, description="processes and threads of the whole attempt, counted once a second"
    )


class WorkerConfig(Part):
    """`kitestring worker --config FILE`."""

    run: str = Field(min_length=1)
    name: str = Field(
        min_length=1,
        max_length=253,
        description="name of this executor in logs and status; {hostname} in it is replaced by the host's name",
    )
    queue_url: Url
    queue_credential_file: Path
    capacity: int = Field(ge=1, le=256, description="agents that run at once")
    agent: AgentCommand
    agent_protocol: AgentProtocol = Field(default_factory=AgentProtocol)
    limits: AgentLimits = AgentLimits()
    launcher_socket: Path | None = Field(
        default=None,
        description="where the launcher of another container comes to; absent: a launcher of our own, on this machine",
    )
    launcher_uid: int | None = Field(default=None, ge=0, description="the user that such a launcher must run as")
    rollout: str | None = Field(
        default=None, min_length=1, description="the only rollout of this worker, which ends when that has ended"
    )
    health: Listener | None = Field(
        default=None, description="where GET /health says whether a launcher is there and the queue answers"
    )
    scratch_root: Path = Field(
        description="folder for the agents' scratch folders, made when it does not exist; with launcher_socket a path "
        "in the launcher's container"
    )
    grace_seconds: float = Field(default=5.0, ge=0, description="between TERM and KILL")
    drain_seconds: float = Field(default=10.0, ge=0, description="what running agents get after SIGTERM")
    linger_seconds: float = Field(
        default=0.0,
        ge=0,
        description="after the end of the run, without agents, how long to wait to be told to end, or for a trainer "
        "that was only started anew: what ends by itself a Deployment starts again, and a pod whose container ends "
        "just as it is told to is long in going",
    )
    poll_seconds: float = Field(default=20.0, gt=0, le=60, description="long poll of the queue")
    ready_seconds: float = Field(default=300.0, gt=0, description="what the modules to preload may take")

    @property
    def told_by_its_pod(self) -> bool:
        """Whether the pod is this one rollout's: when its container `agent` is lost, the pod's status says why (for its
        memory, say), and whoever made the pod tells the queue."""
        return self.launcher_socket is not None and self.rollout is not None

    @model_validator(mode="after")
    def _one_rollout(self) -> WorkerConfig:
        if self.rollout is not None and self.capacity != 1:
            raise ValueError(f"capacity is {self.capacity}, but a worker with `rollout` runs that one alone: set 1")
        return self
