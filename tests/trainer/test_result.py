"""What a process of the trainer leaves for whatever started it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.config import Timing
from kitestring_trainer.driver import main, run
from kitestring_trainer.errors import RunFailedError, UserMistakeError
from kitestring_trainer.result import RunResult, termination_message
from tests.trainer.world import World

RESULT = RunResult(
    phase="Finished",
    reason="Completed",
    message=None,
    step=3,
    steps=3,
    reward=0.5,
    validation=(),
    rollouts={"Succeeded": 9},
    retried=2,
    excluded=0,
    superseded=0,
    skipped_steps=0,
    tokens=10,
    wall_seconds=1.0,
    checkpoint="s3://bucket/run/checkpoints/step-000003/",
    exit_code=0,
)


def validation(step: int) -> dict[str, object]:
    return {"step": step, "mode": "validation-sampled", "reward": 0.5, "rollouts": 8, "scored": 8, "tool_use": None}


@given(
    message=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9000),
    steps=st.integers(0, 300),
    checkpoint=st.none() | st.text(st.characters(codec="ascii", categories=["L"]), max_size=1024),
)
def test_the_termination_message_always_fits(message: str | None, steps: int, checkpoint: str | None) -> None:
    found = tuple(validation(step) for step in range(steps))
    data = termination_message(replace(RESULT, message=message, validation=found, checkpoint=checkpoint))
    assert len(data) <= 4000
    said = json.loads(data)
    assert list(said) == [
        *("phase", "reason", "message", "step", "steps", "validation", "checkpoint", "exit_code"),
        *("reward", "tokens", "skipped_steps", "rollouts"),
    ]
    assert said["rollouts"] == {"classes": {"Succeeded": 9}, "retried": 2, "excluded": 0}
    assert [one["step"] for one in said["validation"]] == sorted({0, steps - 1} if steps else set())
    if message is not None and len(data) < 3900:
        assert said["message"] == message


def test_both_ends_of_a_long_message_stay() -> None:
    said = json.loads(termination_message(replace(RESULT, message="cause " + "x" * 9000 + " remedy")))
    assert said["message"].startswith("cause x") and said["message"].endswith("x remedy")
    assert len(said["message"]) > 3000


def ending(world: World, log: Path) -> tuple[str, str, int]:
    said = json.loads(log.read_bytes())
    whole = world.result()
    assert {key: said[key] for key in said if key not in ("validation", "rollouts")}.items() <= whole.items()
    assert "rollouts" not in said or said["rollouts"]["classes"] == whole["rollouts"]
    return said["phase"], said["reason"], said["exit_code"]


def test_every_ending_is_in_the_termination_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    log = world.folder / "termination"
    log.touch()
    inode = log.stat().st_ino
    world.start_workers()
    assert run(world.config(termination_log=log), world.announce).exit_code == 0
    assert ending(world, log) == ("Finished", "Completed", 0)
    with pytest.raises(UserMistakeError):
        run(world.config(termination_log=log), world.announce)
    assert ending(world, log) == ("Failed", "InvalidSpec", 2)
    assert "go on with --resume" in json.loads(log.read_bytes())["message"]
    for error, expected in (
        (RunFailedError("StepsSkipped", "three in a row"), ("Failed", "StepsSkipped", 3)),
        (RunFailedError("TrainerLost", "a process died", restart_helps=True), ("Failed", "TrainerLost", 1)),
        (ZeroDivisionError("a bug"), ("Failed", "Error", 1)),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("kitestring_trainer.driver.make_learner", fail)
        if isinstance(error, ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                run(world.config(termination_log=log, resume=True), world.announce)
        else:
            run(world.config(termination_log=log, resume=True), world.announce)
        assert ending(world, log) == expected
    assert "ZeroDivisionError: a bug" in json.loads(log.read_bytes())["message"]
    assert log.stat().st_ino == inode, "a file that is mounted cannot be replaced"


def test_other_machines_of_a_collecting_run_have_nothing_to_do(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trainer.json"
    config = world.config(spec__trainer={"backend": "collect", "device": "cpu", "nodes": 2}, ray_head="head:6379")
    path.write_text(config.model_dump_json(by_alias=True))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert main(path, resume=False, announce=world.announce) == 0
    assert not world.store.exists("state/incarnations/000001.json")


def test_a_stop_takes_no_longer_than_kubernetes_waits() -> None:
    assert Timing().stop < 30, "terminationGracePeriodSeconds, unless it is said otherwise"
