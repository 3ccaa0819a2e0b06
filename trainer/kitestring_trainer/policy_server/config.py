"""Configuration of the policy server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PolicyServerConfig(BaseModel):
    """What `kitestring policy-server` serves, and where. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """Hugging Face folder: config, safetensors, tokenizer.json, chat template."""
    served_model_name: str = Field(default="policy", min_length=1)
    """The name that requests must give as `model`."""
    host: str = "127.0.0.1"
    """Interface to bind. The weight routes carry no credential of their own: keep it to the loopback interface."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes any free port."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and reply together; the model's own limit when absent."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    """Sequences generated at the same time; further ones wait."""
    tool_parser: Literal["hermes"] | None = None
    """How tool calls are read from the model's text; without one, requests that offer tools are refused."""
    threads: int = Field(default=1, ge=1, le=256)
    """Threads of torch."""
    seed: int = 0
    """Seeds the sampling of requests that bring no seed of their own."""
    weights_root: Path | None = None
    """New weights are read only from below this folder; without it, reloading is refused."""
    weight_version: str = "default"
    """Version that the weights of `model` are reported as."""
    require_chat_template: bool = False
    """Refuse to start when the tokenizer has no chat template."""
    max_request_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Largest request body."""
