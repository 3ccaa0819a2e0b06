"""What goes into the queue and what comes out of it, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kitestring_rollout.protocol.gateway_admin import AttemptLimits, RewardRule
from kitestring_trainer.queue.executors import PerTask
from kitestring_trainer.queue.proofs import Proof
from kitestring_trainer.queue.state import Final, Tries


@dataclass(frozen=True, slots=True)
class QueueRules:
    """What of the run and its pool the queue needs. Times in seconds."""

    run: str
    model: str
    limits: AttemptLimits
    reward: RewardRule
    deadline_seconds: float
    tries: Tries
    lease_seconds: float = 30.0
    proof_seconds: float = 30.0
    """How long the proof of an ended attempt is awaited while the trace store can be read."""
    overtime_seconds: float = 60.0
    """How far past its deadline an agent is left to its executor; then the queue ends the lease."""
    retry_seconds: float = 2.0
    """Wait before the second attempt where the infrastructure failed; doubled before each further one. What failed is
    often being started again."""
    per_task: PerTask = field(default_factory=PerTask)
    reopen_seconds: float = 0.5
    """Wait before an attempt is opened again after no gateway could."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What is known of a rollout from before a restart."""

    counts: Counter[str]
    final: Final | None
    proof: Proof | None


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A rollout that has ended. `proof` is that of its last attempt, when it was proven complete."""

    rollout: str
    group: str
    task: int
    final: Final
    proof: Proof | None
