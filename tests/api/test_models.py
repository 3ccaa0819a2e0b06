"""The models: defaults, names, what is refused, and the way there and back."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_api.v1alpha1.reward import ExitCodeReward
from kitestring_api.v1alpha1.scalars import QUANTITY_PATTERN
from kitestring_api.v1alpha1.serving import Inference
from kitestring_api.v1alpha1.status import Phase
from tests.api.documents import POOL, RUN, changed


def test_there_and_back() -> None:
    for model, document in ((TrainingRun, RUN), (RolloutPool, POOL)):
        typed = model.from_manifest(document)
        assert model.from_manifest(typed.manifest()) == typed
        assert typed.manifest() == model.from_manifest(typed.manifest()).manifest()


def test_defaults() -> None:
    spec = TrainingRun.from_manifest(RUN).spec
    assert (spec.rollouts.group_size, spec.rollouts.tasks_per_step, spec.rollouts.min_group_size) == (8, 16, 2)
    assert spec.rollouts.async_.max_staleness == 0
    assert (spec.algorithm.advantage, spec.algorithm.loss.clip_high) == ("grpo", 0.28)
    assert (spec.trainer.backend, spec.trainer.mode) == ("verl", "external")
    pool = RolloutPool.from_manifest(POOL).spec
    assert (pool.replicas, pool.rollouts_per_worker, pool.isolation, pool.trust) == (1, 4, "Worker", "standard")
    assert pool.agent_protocol.output.from_ == "stdout"
    assert (pool.reward.missing, pool.reward.duplicates, pool.attempts.max) == ("exclude", "refuse", 3)


def test_objects_are_read_only() -> None:
    spec = TrainingRun.from_manifest(RUN).spec
    with pytest.raises(ValidationError, match="frozen"):
        spec.steps = 3  # type: ignore[misc]


def test_names_of_python_are_for_python_only() -> None:
    assert Inference(gpus_per_replica=2).gpus_per_replica == 2
    with pytest.raises(ValidationError, match="gpus_per_replica"):
        Inference.from_manifest({"gpus_per_replica": 2})


def test_null_is_absent() -> None:
    run = TrainingRun.from_manifest(changed(RUN, {"spec.seed": None, "spec.storage": None, "spec.trainer.image": None}))
    assert (run.spec.seed, run.spec.storage, run.spec.trainer.image) == (0, None, None)
    with pytest.raises(ValidationError, match="zzz"):
        TrainingRun.from_manifest(changed(RUN, {"spec.zzz": None}))


def test_what_is_not_ours_passes_through() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "containers": [
                {
                    "name": "agent",
                    "command": ["./agent"],
                    "resources": {"limits": {"cpu": 2, "memory": "1Gi"}},
                    "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "proxy", "image": "proxy:1"},
            ],
        },
    }
    manifest: Any = RolloutPool.from_manifest(changed(POOL, {"spec.template": template})).manifest()
    found = manifest["spec"]["template"]
    assert found["metadata"] == template["metadata"]
    assert found["spec"]["nodeSelector"] == {"disk": "ssd"}
    agent = found["spec"]["containers"][0]
    assert agent | template["spec"]["containers"][0] == agent  # type: ignore[index]


def test_rows_are_kept_as_they_are() -> None:
    rows = [{"question": "1+1", "answer": None, "nested": {"a": [1, None, 2.5]}}]
    manifest: Any = TrainingRun.from_manifest(changed(RUN, {"spec.tasks.train": {"inline": rows}})).manifest()
    assert manifest["spec"]["tasks"]["train"]["inline"] == rows


def test_overrides_keep_their_types() -> None:
    overrides = {"a.b": 1, "c": 1.5, "d": True, "e": "x"}
    run = TrainingRun.from_manifest(changed(RUN, {"spec.trainer.overrides": overrides}))
    assert [(value, type(value)) for value in run.spec.trainer.overrides.values()] == [
        (value, type(value)) for value in overrides.values()
    ]


@pytest.mark.parametrize("text", ["512Mi", "2G", "1.5Gi", "100", "100k", "5e3", "500m"])
def test_quantities(text: str) -> None:
    pool = RolloutPool.from_manifest(changed(POOL, {"spec.limits.memory": text}))
    assert pool.spec.limits.memory == text


@pytest.mark.parametrize("text", ["", "Mi", "1 Gi", "-1", "1ki", "1KB", "0x10"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValidationError):
        RolloutPool.from_manifest(changed(POOL, {"spec.limits.memory": text}))


def test_a_whole_number_is_a_quantity() -> None:
    assert RolloutPool.from_manifest(changed(POOL, {"spec.limits.memory": 1000})).spec.limits.memory == "1000"
    assert QUANTITY_PATTERN.startswith("^")


def test_a_resource_from_a_cluster_is_read() -> None:
    """With what the API server and kubectl add."""
    live = changed(
        RUN,
        {
            "metadata": {
                "name": "calculator",
                "namespace": "default",
                "uid": "0b5c3c4e-7f55-4e43-9c8e-0d7a2f3f6d11",
                "generation": 2,
                "resourceVersion": "123",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
                "managedFields": [{"manager": "kubectl", "operation": "Apply"}],
                "finalizers": ["kitestring.dev/storage"],
                "ownerReferences": [
                    {"kind": "Workflow", "name": "w", "uid": "1", "apiVersion": "argoproj.io/v1alpha1"}
                ],
            },
            "status": {
                "phase": "Running",
                "observedGeneration": 2,
                "step": 3,
                "reward": 1,
                "startTime": "2026-01-01T00:00:00Z",
                "conditions": [
                    {
                        "type": "Finished",
                        "status": "False",
                        "reason": "Running",
                        "lastTransitionTime": "2026-01-01T00:00:00Z",
                    }
                ],
            },
        },
    )
    run = TrainingRun.from_manifest(live)
    assert run.status is not None
    assert run.status.phase is Phase.RUNNING
    assert not run.status.phase.is_final
    assert run.manifest()["status"]["startTime"] == "2026-01-01T00:00:00Z"  # type: ignore[index]


def test_exit_code_rewards_have_defaults_of_their_own() -> None:
    assert TypeAdapter(ExitCodeReward).validate_python({}) == ExitCodeReward(success=1.0, failure=0.0)


def test_policies_by_what_happens_to_them() -> None:
    spec = TrainingRun.from_manifest(RUN).spec
    assert [policy.name for policy in spec.trained_policies] == ["policy"]
    assert [policy.name for policy in spec.frozen_policies] == ["judge"]


def test_the_api_imports_pydantic_and_nothing_else() -> None:
    """Everything that is in memory after the import, and comes from outside the standard library, is pydantic's."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "import kitestring_api, kitestring_api.names, kitestring_api.v1alpha1, kitestring_api.unsupported\n"
        "import kitestring_api.consistency, kitestring_api.crd, kitestring_api.reference\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    allowed = {
        "kitestring_api",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
    }
    # the standard library's list leaves out its generated module, whose name has the platform in it
    found = [name for name in found if not name.startswith("_sysconfigdata")]
    assert set(found) - allowed - set(sys.stdlib_module_names) == set()
