"""What was trained, written down: one commit per plan, durable before any update is made from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_rollout.protocol.run_status import ValidationResult
from kitestring_trainer.plan import plan_name


@dataclass(frozen=True, slots=True)
class CommittedRollout:
    """What became of one planned rollout. It counts (in baseline, loss, mean reward) iff `excluded` is None.

    `epoch`, `n_calls` and `digest` are those by which `attempt` was proven complete; None for one that was not.
    """

    rollout: str
    group: str
    task: int
    klass: str
    reason: str | None
    attempt: str | None
    tries: int
    epoch: str | None
    n_calls: int | None
    digest: str | None
    reward: float | None
    reward_source: str | None
    excluded: str | None


@dataclass(frozen=True, slots=True)
class StepCommit:
    """Every rollout of one plan, each once. `policy_version` is the version that sampled, None where none was pushed.

    `superseded` are attempts of an earlier incarnation that had ended, sampled from weights that are no more.
    """

    run: str
    mode: Mode
    step: int
    incarnation: int
    policy_version: str | None
    unix_time: float
    rollouts: tuple[CommittedRollout, ...]
    superseded: tuple[str, ...] = ()
    validation: ValidationResult | None = None

    @property
    def name(self) -> str:
        return plan_name(self.mode, self.step)

    @property
    def counted(self) -> tuple[CommittedRollout, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.excluded is None)

    @property
    def classes(self) -> Counter[str]:
        return Counter(rollout.klass for rollout in self.rollouts)

    def to_json(self) -> dict[str, Any]:
        data = {
            "run": self.run,
            "mode": self.mode,
            "step": self.step,
            "incarnation": self.incarnation,
            "policy_version": self.policy_version,
            "unix_time": self.unix_time,
            "superseded": list(self.superseded),
            "rollouts": [_rollout_json(rollout) for rollout in self.rollouts],
        }
        if self.validation is not None:
            data["validation"] = self.validation.model_dump(mode="json")
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepCommit:
        validation = data.get("validation")
        return cls(
            run=data["run"],
            mode=data["mode"],
            step=int(data["step"]),
            incarnation=int(data["incarnation"]),
            policy_version=data["policy_version"],
            unix_time=float(data["unix_time"]),
            rollouts=tuple(_rollout(rollout) for rollout in data["rollouts"]),
            superseded=tuple(data["superseded"]),
            validation=None if validation is None else ValidationResult.model_validate(validation),
        )


def _rollout_json(rollout: CommittedRollout) -> dict[str, Any]:
    data = asdict(rollout)
    data["class"] = data.pop("klass")
    return data


def _rollout(data: dict[str, Any]) -> CommittedRollout:
    return CommittedRollout(klass=data["class"], **{key: value for key, value in data.items() if key != "class"})
