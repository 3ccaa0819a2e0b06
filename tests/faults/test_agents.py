"""Agents that misbehave: each ends in its class, in time, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable

import psutil
import pytest
from local_run import LocalRun, audit

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


def test_every_way_to_misbehave(start_run: Callable[..., LocalRun], tmp_path_factory: pytest.TempPathFactory) -> None:
    mark = f"mark-{tmp_path_factory.mktemp('mark')}"
    tasks: list[dict[str, object]] = [
        {"behaviour": "call"},
        {"behaviour": "fail"},
        {"behaviour": "hang"},
        {"behaviour": "orphans", "mark": mark},
        {"behaviour": "flood"},
        {"behaviour": "silent"},
    ]
    pool = {
        "rolloutsPerWorker": 6,
        "limits": {"seconds": 8, "logBytes": 10_000},
        "reward": {"source": "builtin", "builtin": {"kind": "regex", "pattern": "done"}},
    }
    run = start_run(tasks, group_size=1, pool=pool)
    result = run.wait()
    assert result["phase"] == "Succeeded", result
    assert audit(run.store(), 1) == {"Succeeded": 4, "AgentFailed": 1, "TimedOut": 1}
    commit = json.loads(run.store().get("state/commits/t000001.json"))
    by_task = {tasks[rollout["task"]]["behaviour"]: rollout for rollout in commit["rollouts"]}
    assert by_task["fail"]["excluded"] is not None and by_task["hang"]["excluded"] is not None
    assert by_task["silent"]["n_calls"] == 0 and by_task["silent"]["reward"] == 1.0
    assert by_task["flood"]["reward"] == 0.0
    assert by_task["call"]["n_calls"] == 1
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])], "orphans are ended"
    size = sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    assert size < 30_000_000, "100 MB of output are not kept"
    run.assert_no_process_left()
