"""What a run prints in pipes: a line for each thing, once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kitestring_cli.run.quantities import bytes_of
from kitestring_cli.run.views import JsonView, PlainView, result_text
from kitestring_rollout.protocol.run_status import RunStatus, ValidationResult

RESULT: dict[str, Any] = {
    "run": "r",
    "phase": "Succeeded",
    "reason": "Completed",
    "message": None,
    "steps": 12,
    "validation_before": {"sampled": {"reward": 0.1}},
    "validation_after": {"sampled": {"reward": 0.9}},
    "tokens": 1234,
    "wall_seconds": 61.0,
    "checkpoint": "/runs/r/checkpoints/step-000012",
}


def status(**fields: Any) -> RunStatus:
    values: dict[str, Any] = {
        "run": "r",
        "phase": "RollingOut",
        "step": 1,
        "steps": 12,
        "incarnation": 1,
        "unix_time": 0.0,
    }
    return RunStatus(**(values | fields))


def validation(step: int) -> ValidationResult:
    return ValidationResult(step=step, mode="validation-sampled", reward=0.5, rollouts=4, scored=3, tool_use=0.25)


def test_each_validation_is_said_once() -> None:
    lines: list[str] = []
    view = PlainView(lines.append)
    view.status(status(validation=(validation(0),)))
    view.status(status(validation=(validation(0),)))
    view.status(status(validation=(validation(0), validation(4))))
    assert lines == [
        "validation before training (sampled): reward 0.500 over 3 of 4, tool use 0.25",
        "validation after step 4 (sampled): reward 0.500 over 3 of 4, tool use 0.25",
    ]


def test_a_degraded_run_is_said_once() -> None:
    lines: list[str] = []
    view = PlainView(lines.append)
    for _ in range(3):
        view.status(status(degraded=True, message="correlation 0.9"))
    assert lines == ["degraded: correlation 0.9"]


def test_a_step_names_failures_by_class() -> None:
    lines: list[str] = []
    view = PlainView(lines.append)
    view.status(status())
    view.step(
        {
            "step": 1,
            "reward_mean": 0.25,
            "agreement_kl_k3_nats": 1e-6,
            "entropy_nats": None,
            "tokens_per_second": 800.0,
            "rollouts_counted": 7,
            "rollouts_planned": 8,
            "rollouts_by_class": {"Succeeded": 7, "TimedOut": 1},
            "step_seconds": 4.0,
            "seconds": {"rollout": 3.0, "update": 0.001},
        }
    )
    assert lines == [
        "step 1/12: reward 0.250, KL 0.00000, entropy –, 800 tokens/s, 7 of 8 rollouts count (TimedOut 1), "
        "4.0 s (rollout 3.0)"
    ]


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonView()
    view.note("a note")
    view.status(status())
    view.result(RESULT)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == RESULT
    assert printed.err == "a note\n"


def test_the_closing_lines() -> None:
    text = result_text(RESULT)
    assert "Succeeded: Completed" in text
    assert "validation (sampled): reward 0.100 before, 0.900 after training" in text
    assert "/runs/r/checkpoints/step-000012" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512Mi", 512 * 2**20), ("2G", 2_000_000_000), ("1.5Gi", 3 * 2**29), ("1000", 1000), ("1k", 1000)],
)
def test_quantities(text: str, expected: int) -> None:
    assert bytes_of(text) == expected
