"""Pools of `cases/` as the operator renders their side of a run, and the golden files they are compared with."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import yaml

from kitestring_api import names
from kitestring_operator.observed import Manifest, RunContext, WantedRollout
from kitestring_operator.rollouts import rollout_job, worker_objects
from kitestring_operator.rollouts.worker_config import worker_config
from kitestring_operator.settings import Settings
from tests.operator.parts import rendering

FOLDER = Path(__file__).parent
CASES = tuple(sorted(path.stem for path in (FOLDER / "cases").glob("*.yaml")))

WANTED = WantedRollout(
    rollout="t000001-00000003-002",
    number=2,
    credential="t000001-00000003-002.c0de",
    image="registry.example/tasks/3:1",
    resources={"limits": {"memory": "4Gi", "cpu": 0.5}},
)
"""What the queue asks for where a pool makes Jobs."""


def pool_of(case: str) -> dict[str, Any]:
    spec = yaml.safe_load((FOLDER / "cases" / f"{case}.yaml").read_text())
    return {
        "apiVersion": "kitestring.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "calculator"},
        "spec": spec,
    }


def context(pool: dict[str, Any], *, settings: Settings = rendering.SETTINGS, run: str = "sums") -> RunContext:
    """A run that uses the pool; of itself it does not matter here."""
    training_run, _ = rendering.documents("verl-cpu")
    return rendering.context(training_run | {"metadata": {"name": run}}, pool, settings=settings)


def of_case(case: str) -> RunContext:
    return context(pool_of(case))


def objects_of(made: RunContext) -> list[Manifest]:
    """Everything that the pool makes: with isolation Job for one rollout."""
    jobs = rollout_job(made, WANTED) if made.pool.isolation == "Job" else []
    return [*worker_objects(made), *jobs]


def pod_of(made: RunContext) -> Manifest:
    """Spec of the pod in which agents run."""
    makers = [item for item in objects_of(made) if "template" in item.get("spec", {})]
    (maker,) = [item for item in makers if item["metadata"]["labels"][names.LABEL_COMPONENT] == names.COMPONENT_ROLLOUT]
    spec: Manifest = maker["spec"]["template"]["spec"]
    return spec


def container_of(spec: Manifest, name: str) -> Manifest:
    """A container of a pod, init containers included."""
    return next(one for one in (*spec["initContainers"], *spec["containers"]) if one["name"] == name)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def decoded(secret: Manifest) -> dict[str, Any]:
    """What the worker of one rollout finds."""
    data = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    return data | {"worker.json": json.loads(data["worker.json"])}


def golden_text(case: str) -> str:
    """The objects of a case as one YAML text, secrets decoded, worker.json in front."""
    made = of_case(case)
    parts: list[Any] = [{"worker.json": worker_config(made)}] if made.pool.isolation == "Worker" else []
    for item in objects_of(made):
        data = decoded(item) if item["kind"] == "Secret" else None
        parts.append(item if data is None else item | {"data": data})
    return yaml.dump_all(parts, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def golden_file(case: str) -> Path:
    return FOLDER / "golden" / f"{case}.yaml"
