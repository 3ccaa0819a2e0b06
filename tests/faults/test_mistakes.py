"""What a user gets wrong: one clear error, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from local_run import LocalRun, audit, write_files

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

TASK: list[dict[str, object]] = [{"behaviour": "call", "answer": "x"}]


def kitestring(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kitestring_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def edit(path: Path, change: Callable[[dict[str, dict]], None]) -> None:
    """Change the resources of a file, by kind."""
    documents = list(yaml.safe_load_all(path.read_text()))
    change({document["kind"]: document["spec"] for document in documents})
    path.write_text(yaml.safe_dump_all(documents))


def _set(kind: str, value: object, *path: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        def apply(specs: dict[str, dict]) -> None:
            spec = specs[kind]
            for step in path[:-1]:
                spec = spec.setdefault(step, {})
            spec[path[-1]] = value

        edit(file, apply)

    return change


def _bare_model(file: Path) -> None:
    from tests.policy_server.tiny_policy import make_policy

    model = make_policy(file.parent / "bare", chat_template=False)
    edit(file, lambda specs: specs["TrainingRun"]["policies"][0]["model"].update(path=str(model)))


def _hidden(field: str) -> Callable[[Path], None]:
    return _set("TrainingRun", [field], "tasks", "hiddenFields")


MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "bad YAML": (lambda file: file.write_text("kind: [TrainingRun"), r"run\.yaml:\d+.*YAML"),
    "unknown field": (_set("TrainingRun", 8, "rollouts", "groupsize"), r"spec\.rollouts.*groupsize.*groupSize"),
    "wrong type": (_set("TrainingRun", "many", "steps"), r"spec\.steps.*\"many\".*integer"),
    "bound": (_set("TrainingRun", 0, "rollouts", "groupSize"), r"spec\.rollouts\.groupSize.*0.*1"),
    "cross-field rule": (_set("TrainingRun", 5, "rollouts", "minGroupSize"), r"minGroupSize.*groupSize"),
    "not supported yet": (_set("TrainingRun", "managed", "trainer", "mode"), r"spec\.trainer\.mode.*not supported yet"),
    "missing model folder": (
        lambda file: edit(file, lambda s: s["TrainingRun"]["policies"][0]["model"].update(path="nowhere")),
        r"spec\.policies\[0\]\.model\.path.*nowhere.*--set",
    ),
    "model without chat template": (_bare_model, r"chat template"),
    "missing task file": (
        _set("TrainingRun", "none.jsonl", "tasks", "train", "path"),
        r"spec\.tasks\.train\.path.*none",
    ),
    "empty task file": (
        lambda file: (file.parent / "tasks.jsonl").write_text(""),
        r"tasks\.jsonl.*(empty|no (task|row))",
    ),
    "no JSON in the task file": (lambda file: (file.parent / "tasks.jsonl").write_text("{oops\n"), r"tasks\.jsonl.*1"),
    "no row has the field": (_hidden("solution"), r"solution.*hiddenFields"),
    "missing pool": (_set("TrainingRun", {"name": "others"}, "rollouts", "poolRef"), r"poolRef.*others"),
    "unresolved secret": (
        lambda file: edit(
            file,
            lambda specs: specs["RolloutPool"]["template"]["spec"]["containers"][0].update(
                env=[{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "k"}}}]
            ),
        ),
        r"env\[0\].*Secret gone.*",
    ),
    "missing program": (
        lambda file: edit(
            file, lambda s: s["RolloutPool"]["template"]["spec"]["containers"][0].update(command=["no-such-program"])
        ),
        r"command.*no-such-program",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_files(mistake: str, tmp_path: Path, tiny_model: Path) -> None:
    change, words = MISTAKES[mistake]
    (file,) = write_files(tmp_path, tiny_model, TASK)
    change(file)
    done = kitestring("run", file, "--runs", tmp_path / "runs", "--output", "json", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert re.search(words, done.stderr, re.DOTALL), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") <= 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = kitestring("run", "gone.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "gone.yaml" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "credential").write_text("x" * 32)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = {
            "listen": {"port": taken.getsockname()[1]},
            "store": {"kind": "directory", "path": str(tmp_path / "store")},
            "credential_file": str(tmp_path / "credential"),
        }
        (tmp_path / "collector.json").write_text(json.dumps(config))
        done = kitestring("collector", "--config", tmp_path / "collector.json", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert str(config["listen"]["port"]) in done.stderr and "Traceback" not in done.stderr


def test_odd_rewards_and_overflow_end_in_their_class(start_run: Callable[..., LocalRun]) -> None:
    """A reward that is no finite number is refused and visible; missing stays missing; a second one is refused."""
    bodies = ["NaN", "Infinity", '"1.0"', "true", "1e9", "0.5", "0.5 0.75"]
    tasks: list[dict[str, object]] = [{"behaviour": "reward", "bodies": body.split()} for body in bodies]
    tasks.append({"behaviour": "overflow"})
    run = start_run(tasks, group_size=1, pool={"rolloutsPerWorker": 8, "reward": {"source": "agent", "max": 10.0}})
    assert run.wait()["phase"] == "Succeeded"
    assert audit(run.store(), 1) == {"Succeeded": len(tasks)}
    commit = json.loads(run.store().get("state/commits/t000001.json"))
    rewards = {str(tasks[r["task"]].get("bodies")): r["reward"] for r in commit["rollouts"]}
    assert rewards["['0.5']"] == 0.5
    assert rewards["['0.5', '0.75']"] == 0.5, "the second is refused"
    for body in bodies[:5]:
        assert rewards[str([body])] is None, body
    excluded = {r["excluded"] for r in commit["rollouts"] if r["reward"] is None}
    assert all("no reward" in reason for reason in excluded), excluded
