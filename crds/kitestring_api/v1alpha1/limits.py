"""What one attempt may use, and how often a rollout is tried."""

from typing import Annotated

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.scalars import Label, Quantity, Seconds

TokenCount = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Limits(ApiModel):
    """Limits of one attempt. A call over a limit is answered 429 in the API's own shape, and counted."""

    seconds: Seconds = Field(600, description="Wall time of the agent, in seconds; then TERM, then KILL.")
    calls: int = Field(256, ge=1, le=100_000, description="Calls to models.")
    concurrent_calls: int = Field(16, ge=1, le=1024, description="Calls to models in flight at once.")
    tokens: int = Field(
        1_000_000, ge=1, le=1_000_000_000, description="Tokens of trained policies, prompts and replies together."
    )
    frozen_tokens: dict[Label, TokenCount] = Field(
        default_factory=dict,
        max_length=8,
        description="Tokens of each frozen model, by the name of its policy; absent: no limit of its own.",
    )
    log_bytes: int = Field(
        1_048_576, ge=0, le=104_857_600, description="Bytes of standard output and error that are kept, both together."
    )
    cpu_seconds: int | None = Field(None, ge=1, le=31_536_000, description="CPU time of each process, in seconds.")
    memory: Quantity | None = Field(None, description="Private writable memory of each process, e.g. 512Mi.")
    processes: int | None = Field(None, ge=1, le=100_000, description="Processes and threads of the agent.")
    rewards: int = Field(1, ge=1, le=10_000, description="Rewards that the agent may post.")


class Attempts(ApiModel):
    """How often a rollout is tried, by the class of failure, the first try included."""

    max: int = Field(3, ge=1, le=20, description="Tries when the infrastructure failed, and in all.")
    agent_failed: int = Field(1, ge=1, le=20, description="Tries when the agent ended with an error.")
    timed_out: int = Field(1, ge=1, le=20, description="Tries when the agent ran out of time.")
