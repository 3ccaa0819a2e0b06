"""kitestring inspect: runs found by what a user types, figures put together, mistakes named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kitestring_cli.inspection.view import sparkline
from tests.cli.conftest import Command
from tests.cli.run_folders import MadeUpRun, Try, half_right, make_run


def learn(run: MadeUpRun) -> MadeUpRun:
    """Two steps, validated before and after, with a failed attempt, a lost one, and a rollout that never counts."""

    def first(plan: object, index: int) -> list[Try]:
        if index == 1:
            return [Try("AgentFailed", "exit code 1: boom", None), Try(complete=False), Try(reward=0.0)]
        if index == 2:
            return [Try("TimedOut", "no end within 60 s", None)]
        return [Try()]

    run.validation(0, "validation-greedy")
    run.validation(0, "validation-sampled")
    run.step(1, first, update=True)
    run.step(2, update=True)
    run.validation(2, "validation-greedy")
    run.validation(2, "validation-sampled", lambda _plan, _index: [Try()])
    run.result(checkpoint="/somewhere/step-000002")
    return run


def test_a_run_in_figures(kitestring: Command, tmp_path: Path) -> None:
    learn(make_run(tmp_path / "runs", backend="verl"))
    said = kitestring("inspect", "calc", "--output", "json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert (found["phase"], found["steps"], found["steps_planned"]) == ("Succeeded", 2, 2)
    assert found["validation_before"]["sampled"]["reward"] == 0.5
    assert found["validation_after"]["sampled"]["reward"] == 1.0
    assert found["validation_after"]["greedy"]["step"] == 2
    assert found["rewards"] == [{"step": 1, "reward": pytest.approx(2 / 3)}, {"step": 2, "reward": 0.5}]
    assert found["rollouts"] == {"Succeeded": 7, "TimedOut": 1}
    assert found["counted"] == 7
    excluded = {"klass": "TimedOut", "reason": "no end within 60 s", "count": 1, "example": "t000001-00000001-000"}
    assert found["excluded"] == [excluded]
    assert found["retried"] == 2
    assert (found["correlation_min"], found["kl_max_nats"]) == (0.999999, 2e-6)
    assert found["seconds"] == {"rollout": 12.0, "samples": 1.0, "update": 6.0, "push": 1.0}
    assert found["trained_tokens"] == 80
    assert found["checkpoint"] == "/somewhere/step-000002"
    assert any(item["command"].endswith("t000001-00000001-000") for item in found["next"] if item["command"])


def test_a_run_for_people(kitestring: Command, tmp_path: Path) -> None:
    learn(make_run(tmp_path / "runs", backend="verl"))
    said = kitestring("inspect", "calc")
    assert said.code == 0, said.err
    lines = [line.rstrip() for line in said.out.splitlines()]
    assert lines[:2] == ["calc-20261129-120000  Succeeded  Completed", "2 of 2 steps, backend verl"]
    assert "sampled      0.500  1.000  +0.500            1.00  ▁█" in lines
    assert "reward per step  █▁" in lines
    assert "   2   0.500      4/4        5.0    0.500  0.000002  0.999999     10.0" in lines
    assert "  excluded: 1 × TimedOut: no end within 60 s  (e.g. t000001-00000001-000)" in lines
    assert lines[lines.index("next") + 2] == "    kitestring show runs/calc-20261129-120000 t000001-00000001-000"
    assert "\x1b" not in said.out


@pytest.mark.parametrize("name", ["runs/calc-20261129-120000", "calc-20261129-120000", "calc", "runs/latest", "latest"])
def test_ways_to_name_a_run(kitestring: Command, tmp_path: Path, name: str) -> None:
    made = make_run(tmp_path / "runs")
    make_run(tmp_path / "runs", "calc-20261128-120000")
    make_run(tmp_path / "runs", "calc-extra-20261130-120000")
    (tmp_path / "runs" / "latest").symlink_to(made.folder.name)
    said = kitestring("inspect", name, "--output", "json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["run"] == "calc-20261129-120000"


def test_a_run_that_is_not_there(kitestring: Command, made: MadeUpRun, tmp_path: Path) -> None:
    said = kitestring("inspect", "clac")
    assert (said.code, said.out) == (2, "")
    assert said.err == "error: clac: no such run; did you mean calc? runs below runs/: calc-20261129-120000\n"
    said = kitestring("inspect", "calc", "--runs", "elsewhere")
    assert said.code == 2
    assert "elsewhere/" in said.err
    (tmp_path / "runs" / "latest").symlink_to("gone")
    said = kitestring("inspect", "latest")
    assert said.code == 2
    assert "the run that it points to is gone (gone)" in said.err
    said = kitestring("inspect", tmp_path)
    assert said.code == 2
    assert "no folder of a run" in said.err


def test_a_run_without_a_word(kitestring: Command, made: MadeUpRun) -> None:
    """Begun, then killed before anything was committed: no result, no figures."""
    found = json.loads(kitestring("inspect", "calc", "--output", "json").out)
    assert (found["phase"], found["steps"], found["validation"], found["rewards"]) == ("Unfinished", 0, [], [])
    assert any(item["command"] == "kitestring run --resume runs/calc-20261129-120000" for item in found["next"])
    assert kitestring("inspect", "calc").code == 0


def test_a_failed_run_says_why(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1, lambda _plan, _index: [Try("AgentFailed", "exit code 3: \x1b[2Jno key", None)])
    made.result(phase="Failed", reason="StepsSkipped", message="3 steps in a row had no group to learn from")
    said = kitestring("inspect", "calc")
    assert "Failed  StepsSkipped: 3 steps in a row had no group to learn from" in said.out
    assert "skipped steps (no group to learn from): 1" in said.out
    assert "4 × AgentFailed: exit code 3: \\x1b[2Jno key" in said.out
    assert "\x1b" not in said.out


def test_a_metrics_line_that_was_cut_off_is_left_out_and_said(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1)
    with made.folder.metrics.open("ab") as file:
        file.write(b'{"step":2,"reward_mea')
    found = json.loads(kitestring("inspect", "calc", "--output", "json").out)
    assert found["notes"] == [f"{made.folder.metrics}:2: cut off, left out (the trainer was killed while it wrote)"]
    assert found["completion_tokens"] > 0


@pytest.mark.parametrize("line", [b'{"step":2,"rew\n', b"[]\n", b'{"reward":1}\n', b"nonsense\n"])
def test_a_metrics_line_that_is_none_is_an_error(kitestring: Command, made: MadeUpRun, line: bytes) -> None:
    made.step(1)
    good = made.folder.metrics.read_bytes()
    made.folder.metrics.write_bytes(good + line + good)
    said = kitestring("inspect", "calc")
    assert said.code == 2
    assert said.err.startswith(f"error: {made.folder.metrics}:2: is no JSON object with a step")


def test_lines_of_one_step_are_put_together(kitestring: Command, made: MadeUpRun) -> None:
    """A resumed run gives a validation between steps a line of its own."""
    made.step(1)
    with made.folder.metrics.open("ab") as file:
        file.write(b'{"step":0,"validation":[]}\n{"step":1,"validation":[{"reward":1}]}\n')
    assert json.loads(kitestring("inspect", "calc", "--output", "json").out)["completion_tokens"] == 40


def test_a_folder_without_a_store(kitestring: Command, made: MadeUpRun) -> None:
    made.folder.store.rename(made.folder.root / "away")
    said = kitestring("inspect", "calc")
    assert said.code == 2
    assert said.err == f"error: {made.folder.store}: missing; the run left no records, or they were removed\n"
    assert not made.folder.store.exists()


def test_a_run_that_was_moved_is_read_where_it_lies(kitestring: Command, made: MadeUpRun, tmp_path: Path) -> None:
    made.step(1, half_right)
    moved = tmp_path / "elsewhere"
    made.folder.root.rename(moved)
    said = kitestring("inspect", moved, "--output", "json")
    assert json.loads(said.out)["steps"] == 1


def test_a_long_run_shows_some_of_its_steps(kitestring: Command, made: MadeUpRun) -> None:
    for step in range(1, 31):
        made.step(step)
    said = kitestring("inspect", "calc")
    assert "24 of 30 steps; all are in metrics.jsonl" in said.out
    assert " 30  " in said.out


def test_sparklines() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, None, 1.0]) == "▁ ▁"
    assert sparkline([None]) == ""
