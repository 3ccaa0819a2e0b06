"""`kitestring run` with a scorer container of the user's, which on one machine is a process beside the run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_run import LocalRun, audit, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

Start = Callable[..., LocalRun]
JUDGE = Path(__file__).parent / "judge.py"
TASKS = [{"behaviour": "call", "worth": 0.25}, {"behaviour": "call", "worth": 4}]
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "judge"}, "stringData": {"key": "s3cret"}}


def start_judged(start_run: Start, tmp_path: Path, *, command: list[str] | None = None, **env: str) -> LocalRun:
    (tmp_path / "judged").mkdir()
    scorer = {
        "image": "registry.example/judge:1",
        "command": command or [sys.executable, str(JUDGE)],
        "env": [
            {"name": "JUDGED", "value": str(tmp_path / "judged")},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "judge", "key": "key"}}},
            *({"name": name, "value": value} for name, value in env.items()),
        ],
    }
    hidden = {"train": {"path": "tasks.jsonl"}, "hiddenFields": ["worth"]}
    return start_run(
        TASKS,
        pool={"reward": {"source": "scorer", "scorer": scorer}, "agentProtocol": {"task": {"from": "file"}}},
        run={"tasks": hidden},
        documents=[SECRET],
    )


def judged(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "judged").iterdir())]


def rewards(run: LocalRun) -> list[float]:
    commit = json.loads(run.store().get("state/commits/t000001.json"))
    return sorted(rollout["reward"] for rollout in commit["rollouts"])


def test_rewards_come_from_the_scorer_by_hidden_fields(start_run: Start, tmp_path: Path) -> None:
    run = start_judged(start_run, tmp_path)
    result = run.wait()
    assert result["phase"] == "Succeeded", (result, run.logs())
    assert audit(run.store(), 1) == {"Succeeded": 4}
    assert rewards(run) == [0.25, 0.25, 4.0, 4.0]
    questions = judged(tmp_path)
    assert len(questions) == 4
    assert all(set(question["task"]) == {"behaviour"} for question in questions)
    assert all(set(question["hidden"]) == {"worth"} and question["exitCode"] == 0 for question in questions)
    said = (run.folder / "logs" / "scorer.log").read_text()
    assert "'KEY'" in said and str(tmp_path) in said, "its environment, and the folder of the file"
    assert "KITESTRING" not in said
    config = (run.folder / "config" / "scorer.json").read_text()
    assert "s3cret" not in config, "a Secret's value never stands in a config"
    run.assert_no_process_left()


@pytest.mark.parametrize("victim", ["its own process", "the part that watches it"])
def test_a_scorer_killed_while_it_scores_is_started_again_and_asked_again(
    start_run: Start, tmp_path: Path, victim: str
) -> None:
    release = tmp_path / "release"
    run = start_judged(start_run, tmp_path, RELEASE=str(release))
    wait_until(lambda: len(list((tmp_path / "judged").iterdir())) == 4, "four scores in progress", while_=run._alive)
    part = run.part("scorer")
    (own,) = part.children()
    (own if victim == "its own process" else part).send_signal(signal.SIGKILL)
    run.part("scorer", besides=part.pid)
    release.touch()
    result = run.wait()
    assert result["phase"] == "Succeeded", (result, run.logs())
    assert rewards(run) == [0.25, 0.25, 4.0, 4.0]
    askers = {path.name.partition("-")[0] for path in (tmp_path / "judged").iterdir()}
    assert len(askers) == 2, "the one that was killed, and the next"
    run.assert_no_process_left()


def test_kill_9_of_the_run_ends_its_scorer_too(start_run: Start, tmp_path: Path) -> None:
    run = start_judged(start_run, tmp_path, RELEASE=str(tmp_path / "release"))
    wait_until(lambda: len(list((tmp_path / "judged").iterdir())) == 4, "four scores in progress", while_=run._alive)
    assert run.part("scorer").children()
    run.processes()
    run.process.kill()
    run.process.communicate(timeout=60)
    run.assert_no_process_left()


def test_a_scorer_that_ends_by_itself_fails_the_run_with_its_last_words(start_run: Start, tmp_path: Path) -> None:
    run = start_judged(start_run, tmp_path, command=[sys.executable, "-c", "raise SystemExit('no model here')"])
    out, err = run.process.communicate(timeout=100)
    assert run.process.returncode == 1
    assert json.loads(out)["phase"] == "Failed"
    assert "scorer ended with exit code 1" in err and "no model here" in err
    assert "the scorer ended by itself with exit code 1" in err
    assert "Traceback" not in err
    run.assert_no_process_left()


def test_a_scorer_without_a_command_is_refused_by_name(start_run: Start, tmp_path: Path) -> None:
    pool = {"reward": {"source": "scorer", "scorer": {"image": "registry.example/judge:1"}}}
    run = start_run(TASKS, pool=pool)
    _, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 2
    assert "RolloutPool/agents:spec.reward.scorer.command: found nothing" in err
    assert "a local run starts no image: write what it would start" in err
