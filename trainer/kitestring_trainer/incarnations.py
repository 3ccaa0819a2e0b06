"""Incarnations: each start of the trainer, and which policy versions are the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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


def same_weights(history: Sequence[Incarnation]) -> frozenset[str]:
    """Policy versions whose weights are those that the last incarnation of `history` starts from.

    Let c be the step it resumed from. The state of c was written by the last earlier incarnation that had started
    below c (it alone made the update of c; all later ones started from that state or a newer one). So the weights are
    version `c` of that writer and of every later incarnation that started from c. Push 0 is the initial model for all.
    """
    current = history[-1]
    step = current.resumed_step
    writer = max((i.number for i in history[:-1] if i.resumed_step < step), default=0)
    later = [i for i in history if i.number > writer and i.resumed_step == step]
    versions = {policy_version(i.number, step) for i in later}
    if writer:
        versions.add(policy_version(writer, step))
    return frozenset(versions)
