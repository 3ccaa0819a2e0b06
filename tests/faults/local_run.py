"""A run under test: its files, its processes, what it leaves, and an audit of what it says it trained on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from kitestring_rollout.storage import DirectoryStoreConfig, ObjectStore, open_store
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.reader import read_attempts

AGENT = Path(__file__).parent / "behaving_agent.py"


def write_files(
    folder: Path,
    model: Path,
    tasks: list[dict[str, object]],
    *,
    steps: int = 1,
    group_size: int = 2,
    pool: dict[str, object] | None = None,
    run: dict[str, object] | None = None,
    documents: list[dict[str, object]] | None = None,
) -> list[Path]:
    """A pool with the behaving agent and a collecting run, all tasks in each step."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    resources = [
        {
            "apiVersion": "kitestring.dev/v1alpha1",
            "kind": "RolloutPool",
            "metadata": {"name": "agents"},
            "spec": {
                "rolloutsPerWorker": 4,
                "template": {"spec": {"containers": [{"name": "agent", "command": [sys.executable, str(AGENT)]}]}},
                "reward": {"source": "exitCode"},
                "limits": {"seconds": 30},
                **(pool or {}),
            },
        },
        {
            "apiVersion": "kitestring.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "faults"},
            "spec": {
                "policies": [{"name": "policy", "model": {"path": str(model)}, "toolParser": "hermes"}],
                "tasks": {"train": {"path": "tasks.jsonl"}},
                "rollouts": {
                    "poolRef": {"name": "agents"},
                    "groupSize": group_size,
                    "minGroupSize": 1,
                    "tasksPerStep": len(tasks),
                },
                "trainer": {"backend": "collect", "device": "cpu"},
                "inference": {"backend": "cpu"},
                "traces": {"collector": {"kind": "builtin"}},
                "failurePolicy": {"maxSkippedSteps": 100},
                "steps": steps,
                **(run or {}),
            },
        },
        *(documents or []),
    ]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump_all(resources))
    return [path]


class LocalRun:
    """`kitestring run` as a process; `folder` is its run folder."""

    def __init__(
        self, root: Path, files: list[Path], overrides: tuple[str, ...] = (), resume: Path | None = None
    ) -> None:
        self._runs = root / "runs"
        arguments = ["--resume", str(resume)] if resume else [str(file) for file in files]
        for override in overrides:
            arguments += ["--set", override]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kitestring_cli", "run", *arguments, "--runs", str(self._runs), "--output", "json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=root,
        )
        self._seen: dict[int, psutil.Process] = {}
        self._resumed = resume

    @property
    def folder(self) -> Path:
        return self._resumed or (self._runs / "latest").resolve()

    def part(self, name: str, *, besides: int | None = None) -> psutil.Process:
        """The process of a part; waits until there is one (another than the pid `besides`)."""

        def find() -> psutil.Process | None:
            for process in self.processes():
                try:
                    line = process.cmdline()
                except psutil.NoSuchProcess:
                    continue
                if f"{self.folder}/config/{name}.json" in line and process.pid != besides:
                    return process
            return None

        found: psutil.Process = wait_until(find, f"a process of {name}", while_=self._alive)
        return found

    def processes(self) -> list[psutil.Process]:
        """Every process below the run, remembered for the check that none is left."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        return list(self._seen.values())

    def wait(self, seconds: float = 110) -> dict[str, Any]:
        """The run's closing object."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            self.processes()
            if time.monotonic() > deadline:
                raise AssertionError(f"the run goes on after {seconds} s:\n{self.logs()}")
            time.sleep(0.05)  # no event tells when a process has ended while we watch what it starts
        out, err = self.process.communicate()
        if not out.strip():
            raise AssertionError(f"exit {self.process.returncode}, no result:\n{err}\n{self.logs()}")
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("logs/*")
        )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
        self.assert_no_process_left()

    def assert_no_process_left(self) -> None:
        """Nothing that the run started, nor what that started, is alive."""
        wait_until(lambda: not self._living() or None, f"the end of {self._living()}", seconds=10)

    def _living(self) -> list[psutil.Process]:
        return [p for p in self._seen.values() if _lives(p)]

    def _alive(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"the run ended with {self.process.returncode}:\n{self.logs()}")

    def store(self) -> ObjectStore:
        return open_store(DirectoryStoreConfig(kind="directory", path=self.folder / "store"))


def _lives(process: psutil.Process) -> bool:
    """Whether it is there, not ended and merely not waited for; it may end while this is asked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(
    check: Callable[[], Any], what: str, *, seconds: float = 60, while_: Callable[[], None] | None = None
) -> Any:
    """The first result of `check` that is not None and not False."""
    deadline = time.monotonic() + seconds
    while (found := check()) in (None, False):
        if while_ is not None:
            while_()
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)  # what other processes do has no event that we could wait for
    return found


def audit(store: ObjectStore, steps: int) -> Counter[str]:
    """Check the commits of a run against its plans and its traces; rollouts by class over all steps.

    Every planned rollout is committed exactly once; every one that counts was read back complete, with the very number
    of calls and digest that the commit names, and no attempt counts twice.
    """
    classes: Counter[str] = Counter()
    counted: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        plan = json.loads(store.get(f"state/plans/t{step:06d}.json"))
        commit = json.loads(store.get(f"state/commits/t{step:06d}.json"))
        planned = sorted(rollout for group in plan["groups"] for rollout in group["rollouts"])
        committed = sorted(rollout["rollout"] for rollout in commit["rollouts"])
        assert committed == planned, "every planned rollout exactly once"
        classes.update(rollout["class"] for rollout in commit["rollouts"])
        counted += [rollout for rollout in commit["rollouts"] if rollout["excluded"] is None]
    attempts = [rollout["attempt"] for rollout in counted]
    assert len(set(attempts)) == len(attempts), "no attempt counts twice"
    read = {attempt.attempt: attempt for attempt in read_attempts(store, attempts)}
    for rollout in counted:
        assert rollout["class"] not in ("Infrastructure", "InvalidTask"), rollout
        attempt = read[rollout["attempt"]]
        assert isinstance(attempt, ProvenAttempt), attempt
        assert attempt.end.rollout == rollout["rollout"]
        assert (attempt.end.n_calls, attempt.end.digest) == (rollout["n_calls"], rollout["digest"])
        assert [call.seq for call in attempt.calls()] == list(range(1, attempt.end.n_calls + 1))
    return classes
