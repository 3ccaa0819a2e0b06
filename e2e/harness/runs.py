"""Runs and pools as a user writes them, small enough for two cores, and waiting for what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from e2e.harness.agents import script
from e2e.harness.api import Object, condition, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import POOL, RUN
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase

ANSWER: Final = script("answering")
ELSEWHERE: Final[Object] = {
    "name": "judge",
    "train": False,
    "endpoint": {"url": "http://judge.invalid/v1", "model": "judge"},
}
"""The policy of a run whose agents ask no model: it has no policy server."""


def pool(images: Images, name: str = "pool", *, script: str = ANSWER, **spec: Any) -> Object:
    """A pool of agents that run a Python script; `spec` replaces fields of its spec."""
    container = {"name": "agent", "image": images.python, "command": ["python3", "-c", script]}
    plain: dict[str, Any] = {
        "replicas": 1,
        "rolloutsPerWorker": 4,
        "template": {"spec": {"containers": [container]}},
        "agentProtocol": {
            "task": {"from": "stdin", "format": "text", "field": "question"},
            "output": {"from": "stdout"},
        },
        "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
        "limits": {"seconds": 60, "calls": 8, "tokens": 4000},
    }
    return _object(names.KIND_ROLLOUT_POOL, name, plain | spec)


def collecting(name: str = "run", *, pool: str = "pool", steps: int = 2, **spec: Any) -> Object:
    """A run that only collects rollouts, of the quick start's model and tasks; `spec` replaces fields of its spec."""
    plain: dict[str, Any] = {
        "policies": [{"name": "policy", "train": True, "model": {"path": "./model"}, "maxModelLen": 512}],
        "tasks": {"train": {"path": "./tasks/train.jsonl"}, "hiddenFields": ["answer"]},
        "rollouts": {"poolRef": {"name": pool}, "tasksPerStep": 2, "groupSize": 2},
        "trainer": {"backend": "collect", "device": "cpu"},
        "inference": {"backend": "cpu"},
        "steps": steps,
    }
    return _object(names.KIND_TRAINING_RUN, name, plain | spec)


def until_phase(namespace: Namespace, name: str, *phases: Phase, seconds: float) -> Object:
    """The run, once its phase is one of these. A run that ends otherwise fails the scenario at once."""

    def done(run: Object) -> bool:
        phase = run.get("status", {}).get("phase")
        if phase in phases:
            return True
        assert phase is None or not Phase(phase).is_final, f"{name} is {phase}: {_why(run)}"
        return False

    return namespace.until_object(RUN, name, done, f"run {name} in {' or '.join(phases)}", seconds=seconds)


def until_step(namespace: Namespace, name: str, step: int, *, seconds: float) -> Object:
    """The run, once it has done so many steps. A run that fails before fails the scenario at once."""

    def done(run: Object) -> bool:
        status = run.get("status", {})
        assert status.get("phase") != Phase.FAILED, f"{name} failed: {_why(run)}"
        return int(status.get("step") or 0) >= step

    return namespace.until_object(RUN, name, done, f"step {step} of run {name}", seconds=seconds)


def until_finished(namespace: Namespace, name: str, *, seconds: float) -> Object:
    """The run, once its condition Finished is true, whichever way it ended."""
    return namespace.until_condition(RUN, name, "Finished", seconds=seconds)


def until_status(
    namespace: Namespace, name: str, done: Callable[[dict[str, Any]], bool], what: str, *, seconds: float
) -> Object:
    """The run, once `done` says so of its status."""
    return namespace.until_object(RUN, name, lambda run: done(run.get("status", {})), what, seconds=seconds)


def until_accepted_is(namespace: Namespace, name: str, status: str, *, seconds: float) -> dict[str, Any]:
    """The condition Accepted of a run, once it is `True` or `False`."""
    run = namespace.until_object(
        RUN,
        name,
        lambda run: condition(run, "Accepted").get("status") == status,
        f"Accepted={status} of {name}",
        seconds=seconds,
    )
    return condition(run, "Accepted")


def assert_succeeded(run: Object) -> None:
    """Fail with the run's own words unless it ended well."""
    assert is_true(run, "Finished"), f"not finished: {_why(run)}"
    assert run["status"]["phase"] == Phase.SUCCEEDED, _why(run)


def scale(namespace: Namespace, name: str, replicas: int) -> None:
    """`kubectl scale` on a pool."""
    namespace.patch(POOL, name, {"spec": {"replicas": replicas}}, "scale")


def _why(run: Object) -> str:
    status = run.get("status", {})
    return f"{status.get('phase')} {status.get('reason')}: {status.get('message')}\n{status.get('lastError') or ''}"


def _object(kind: str, name: str, spec: dict[str, Any]) -> Object:
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
