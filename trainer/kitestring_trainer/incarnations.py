"""Incarnations: each start of the trainer, and which policy versions are the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SUPERSEDED = "superseded: another incarnation of the trainer had opened it"
"""Reason in the end records of attempts that an incarnation left open. They count as no try of their rollout."""
STOPPED = "superseded: its trainer ended before it"
"""The same, of attempts that a trainer ends because it ends itself."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of the trainer. It went on from the weights after step `resumed_step`; 0 is the initial model."""

    number: int
    unix_time: float
    resumed_step: int
    versions: dict[str, str] = field(default_factory=dict)
    """Of Kitestring and of what it trains with."""

    def to_json(self) -> dict[str, Any]:
        return {
            "incarnation": self.number,
            "unix_time": self.unix_time,
            "resumed_step": self.resumed_step,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Incarnation:
        return cls(int(data["incarnation"]), float(data["unix_time"]), int(data["resumed_step"]), data["versions"])


def policy_version(incarnation: int, push: int) -> str:
    return f"{incarnation}.{push}"


def incarnation_of(version: str) -> int:
    """Which incarnation a policy version is of; ValueError for what is none."""
    return int(version.partition(".")[0])


def writer_of(history: Sequence[Incarnation], step: int) -> int:
    """Which incarnation of `history` made the weights after `step` (from 1), if they were made; 0: none has.

    The last one that started below `step`: all later ones started from those weights, or from newer ones.
    """
    return max((i.number for i in history if i.resumed_step < step), default=0)


def same_weights(history: Sequence[Incarnation]) -> frozenset[str]:
    """Policy versions whose weights are those that the last incarnation of `history` starts from.

    Let c be the step it resumed from. The weights are version `c` of the earlier incarnation that made them, and of
    every later one that started from c. Push 0 is the initial model for all.
    """
    current = history[-1]
    step = current.resumed_step
    writer = writer_of(history[:-1], step)
    later = [i for i in history if i.number > writer and i.resumed_step == step]
    versions = {policy_version(i.number, step) for i in later}
    if writer:
        versions.add(policy_version(writer, step))
    return frozenset(versions)
