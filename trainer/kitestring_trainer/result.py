"""How a process of the trainer ended: for a reader of the run's folder, and for whatever started the process."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kitestring_rollout.protocol.run_status import Phase

logger = logging.getLogger(__name__)

RESULT_FILE = "trainer-result.json"
TERMINATION_BYTES = 4000
"""Kubernetes keeps 4,096 bytes of a container's termination message."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How this process ended; also written to `trainer-result.json`."""

    phase: Phase
    reason: str
    message: str | None
    step: int
    """The last step that was made, not the one in progress; 0: none."""
    steps: int
    reward: float | None
    """Mean reward of the last committed step."""
    validation: tuple[dict[str, Any], ...]
    rollouts: dict[str, int]
    """Committed training rollouts of the whole run by failure class."""
    retried: int
    """Attempts after a rollout's first, of this process."""
    excluded: int
    superseded: int
    skipped_steps: int
    tokens: int
    wall_seconds: float
    checkpoint: str | None
    exit_code: int

    def write(self, folder: Path, termination_log: Path | None) -> None:
        (folder / RESULT_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")
        if termination_log is not None:
            try:
                # In place: in a container this file is mounted, and cannot be replaced by another.
                termination_log.write_bytes(termination_message(self))
            except OSError as error:  # the ending is what it is, whoever hears of it
                logger.error("the termination log %s cannot be written: %s", termination_log, error)


def termination_message(result: RunResult) -> bytes:
    """One JSON object of at most `TERMINATION_BYTES`; of too many validations the first step's and the latest stay,
    too long a message loses its middle."""
    fields: dict[str, Any] = {
        "phase": result.phase,
        "reason": result.reason,
        "message": result.message,
        "step": result.step,
        "steps": result.steps,
        "validation": _first_and_last(result.validation),
        "checkpoint": result.checkpoint,
        "exit_code": result.exit_code,
        **_totals(result),
    }
    data = _json(fields)
    message = result.message or ""
    keep = len(message)
    while len(data) > TERMINATION_BYTES and keep:
        keep = max(0, keep - max(16, (len(data) - TERMINATION_BYTES) // 4))
        fields["message"] = f"{message[: keep // 2]} … {message[len(message) - (keep - keep // 2) :]}"
        data = _json(fields)
    return data


def _totals(result: RunResult) -> dict[str, Any]:
    """Nothing where it ended before it knew what earlier processes had done."""
    if not result.rollouts:
        return {}
    return {
        "reward": result.reward,
        "tokens": result.tokens,
        "skipped_steps": result.skipped_steps,
        "rollouts": {"classes": result.rollouts, "retried": result.retried, "excluded": result.excluded},
    }


def _first_and_last(validation: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    steps = {found["step"] for found in validation}
    kept = {min(steps), max(steps)} if steps else set()
    return [found for found in validation if found["step"] in kept]


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
