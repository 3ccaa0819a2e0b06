"""The status of a pool: sums over the runs that use it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kitestring_api.v1alpha1.status import RolloutPoolStatus
from kitestring_operator.observed import Manifest
from kitestring_operator.rollouts import pool_status
from tests.operator.rollouts.rendering import objects_of, of_case

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
POOL: Manifest = {
    "apiVersion": "kitestring.dev/v1alpha1",
    "kind": "RolloutPool",
    "metadata": {"name": "calculator", "namespace": "team-a", "generation": 3},
    "spec": {},
}


def _run(
    name: str,
    phase: str | None = None,
    pool: str = "calculator",
    namespace: str = "team-a",
    started: bool = True,
) -> Manifest:
    status = ({"phase": phase} if phase else {}) | ({"startTime": "2026-03-01T11:00:00Z"} if started else {})
    return {
        "kind": "TrainingRun",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"rollouts": {"poolRef": {"name": pool}}},
        "status": status,
    }


def _pod(phase: str = "Running", ready: bool = True, **metadata: Any) -> Manifest:
    labels = {"kitestring.dev/pool": "calculator", "app.kubernetes.io/component": "rollout"}
    return {
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team-a", "labels": labels} | metadata,
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def _status(runs: list[Manifest], objects: list[Manifest], problems: tuple[str, ...] = ()) -> dict[str, Any]:
    return pool_status(POOL, runs, objects, problems, NOW)


def test_a_pool_that_nobody_uses() -> None:
    assert _status([], []) == {
        "observedGeneration": 3,
        "replicas": 0,
        "readyReplicas": 0,
        "runs": 0,
        "users": [],
        "selector": "app.kubernetes.io/component=rollout,kitestring.dev/pool=calculator",
        "conditions": [
            {
                "type": "Accepted",
                "status": "True",
                "observedGeneration": 3,
                "lastTransitionTime": "2026-03-01T12:00:00Z",
                "reason": "Accepted",
                "message": "",
            }
        ],
    }


def test_users_are_the_runs_that_refer_to_it_and_are_under_way() -> None:
    runs = [
        _run("new", started=False),
        _run("refused", "Pending", started=False),
        _run("waiting", "Queued", started=False),
        _run("queued-again", "Queued"),
        _run("running", "Running"),
        _run("asleep", "Suspended"),
        _run("done", "Succeeded"),
        _run("broken", "Failed"),
        _run("elsewhere", "Running", pool="other"),
        _run("namesake", "Running", namespace="team-b"),
    ]
    status = _status(runs, [])
    assert (status["runs"], status["users"]) == (3, ["asleep", "queued-again", "running"])


def test_users_are_bounded_but_counted() -> None:
    status = _status([_run(f"run-{index:03d}", "Running") for index in range(100)], [])
    assert (status["runs"], len(status["users"]), status["users"][0]) == (100, 64, "run-000")


def test_replicas_are_the_pods_of_all_runs() -> None:
    other = {"labels": {"kitestring.dev/pool": "other", "app.kubernetes.io/component": "rollout"}}
    status = _status(
        [],
        [
            _pod(),
            _pod("Pending", ready=False),
            _pod("Running", ready=False),
            _pod("Running", deletionTimestamp="2026-03-01T12:00:00Z"),
            _pod("Failed", ready=False),
            _pod("Succeeded", ready=False),
            _pod(**other),
            _pod(namespace="team-b"),
            _pod(labels={}),
        ],
    )
    assert (status["replicas"], status["readyReplicas"]) == (3, 1)


@pytest.mark.parametrize("case", ["worker", "job"])
def test_the_selector_finds_the_pods_that_are_made(case: str) -> None:
    selector = dict(part.split("=") for part in _status([], [])["selector"].split(","))
    (labels,) = [
        item["spec"]["template"]["metadata"]["labels"]
        for item in objects_of(of_case(case))
        if "template" in item.get("spec", {})
    ]
    assert labels.items() >= selector.items()


def test_a_condition_keeps_its_time_while_it_holds() -> None:
    first = _status([], [], ("spec.x: wrong",))
    later = datetime(2026, 3, 1, 13, 0, 0, tzinfo=UTC)
    same = pool_status(POOL | {"status": first}, [], [], ("spec.x: wrong", "spec.y: wrong"), later)["conditions"][0]
    assert same["lastTransitionTime"] == "2026-03-01T12:00:00Z"
    assert (same["status"], same["reason"], same["message"]) == ("False", "InvalidSpec", "spec.x: wrong\nspec.y: wrong")
    mended = pool_status(POOL | {"status": first}, [], [], (), later)["conditions"][0]
    assert (mended["status"], mended["lastTransitionTime"]) == ("True", "2026-03-01T13:00:00Z")


def test_the_status_is_one_of_the_api() -> None:
    status = _status([_run("a", "Running")], [_pod()], ("spec.x: wrong",))
    assert RolloutPoolStatus.from_manifest(status).runs == 1
