"""Figures of a step: one JSON object per line in `metrics.jsonl` (docs/metrics.md says what each key means)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from kitestring_rollout.protocol.run_status import ValidationResult
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.learner import UpdateMetrics
from kitestring_trainer.queue.proofs import Proof
from kitestring_trainer.samples.batches import Samples
from kitestring_trainer.verl_backend.folders import flush


class MetricsFile:
    """Appends one line per step; each line is written whole, and is on disk before the next step begins."""

    def __init__(self, path: Path, appended: Callable[[Path], None] | None = None) -> None:
        """`appended` is called with the file after every line."""
        self._path = path
        self._appended = appended

    def rewind(self, step: int) -> None:
        """Keep the lines up to `step`: a run that goes on from there makes the later ones anew."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n") and orjson.loads(line)["step"] <= step:  # a kill may leave half a line
                kept.append(line)
        temporary = self._path.with_suffix(".part")
        temporary.write_bytes(b"".join(kept))
        flush(temporary)
        temporary.replace(self._path)
        flush(self._path.parent)

    def has_step(self, step: int) -> bool:
        """Whether the figures of a step's rollouts are there."""
        return any(line["step"] == step and "reward_mean" in line for line in self._lines())

    def tokens(self) -> int:
        """Prompt and completion tokens of all steps that are there."""
        return sum(line.get("prompt_tokens", 0) + line.get("completion_tokens", 0) for line in self._lines())

    def _lines(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self._path.read_bytes().splitlines()] if self._path.exists() else []

    def append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(orjson.dumps(finite(dict(line))) + b"\n")
        flush(self._path)
        if self._appended is not None:
            self._appended(self._path)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def rollout_metrics(commit: StepCommit, proofs: Sequence[Proof]) -> dict[str, Any]:
    """Figures of the rollouts of one plan; `proofs` are those of its last attempts that were proven complete."""
    rewards = [rollout.reward for rollout in commit.counted if rollout.reward is not None]
    calls = [call for proof in proofs for call in proof.calls]
    completion = [sum(call.completion_tokens or 0 for call in proof.calls) for proof in proofs]
    seconds = sorted(proof.end.seconds for proof in proofs if proof.end.seconds is not None)
    finish = [choice.finish_reason for call in calls for choice in call.choices]
    return {
        "reward_mean": _mean(rewards),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "groups_planned": len({rollout.group for rollout in commit.rollouts}),
        "groups_counted": len({rollout.group for rollout in commit.counted}),
        "groups_without_spread": _without_spread(commit),
        "rollouts_planned": len(commit.rollouts),
        "rollouts_counted": len(commit.counted),
        "rollouts_excluded": len(commit.rollouts) - len(commit.counted),
        "rollouts_by_class": dict(sorted(commit.classes.items())),
        "attempts_retried": sum(max(0, rollout.tries - 1) for rollout in commit.rollouts),
        "attempts_superseded": len(commit.superseded),
        "calls_total": len(calls),
        "calls_failed": sum(call.outcome != "ok" for call in calls),
        "calls_nonconforming": sum(bool(call.nonconforming) for call in calls),
        "calls_per_rollout": _mean([len(proof.calls) for proof in proofs]),
        "prompt_tokens": sum(call.prompt_tokens or 0 for call in calls),
        "completion_tokens": sum(completion),
        "completion_tokens_per_rollout": _mean(completion),
        "completion_tokens_per_rollout_max": max(completion, default=None),
        "replies_cut_share": sum(reason == "length" for reason in finish) / len(finish) if finish else None,
        "agent_seconds_mean": _mean(seconds),
        "agent_seconds_max": seconds[-1] if seconds else None,
    }


def sample_metrics(samples: Samples) -> dict[str, Any]:
    """Figures of the rows made of a step's rollouts."""
    return {
        "rows": len(samples.batch.rows),
        "rows_dropped": samples.rows_dropped,
        "rows_per_rollout": samples.rows_per_rollout,
        "groups_skipped": len(samples.skipped_groups),
        "transitions_excluded": sum(record.excluded is not None for record in samples.records),
    }


def update_metrics(update: UpdateMetrics) -> dict[str, Any]:
    """Figures of the optimizer updates of a step."""
    return {
        "updates": update.updates,
        "loss_mean": _mean(update.loss),
        "grad_norm_mean": _mean(update.grad_norm),
        "grad_norm_max": max(update.grad_norm, default=None),
        "learning_rate": update.learning_rate,
        "entropy_nats": update.entropy,
        "clip_share": update.clip_fraction,
        "policy_kl_nats": update.policy_kl,
        "trained_tokens": update.trained_tokens,
        "agreement_tokens": update.agreement.tokens,
        "agreement_correlation": update.agreement.correlation,
        "agreement_kl_k1_nats": update.agreement.kl_k1,
        "agreement_kl_k3_nats": update.agreement.kl_k3,
        "agreement_largest_difference_nats": update.agreement.largest_difference,
        "backend_seconds": dict(update.seconds),
        "backend": dict(update.raw),
    }


def validation_metrics(results: Sequence[ValidationResult]) -> dict[str, Any]:
    return {"validation": [result.model_dump(mode="json") for result in results]}


def _without_spread(commit: StepCommit) -> int:
    groups: dict[str, set[float | None]] = {}
    for rollout in commit.counted:
        groups.setdefault(rollout.group, set()).add(rollout.reward)
    return sum(len(rewards) == 1 for rewards in groups.values())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
