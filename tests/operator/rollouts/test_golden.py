"""The objects of a pool: compared with golden files, with the Kubernetes API, and with what the worker reads.

`UPDATE_GOLDEN=1 pytest tests/operator/rollouts/test_golden.py` writes the golden files anew.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator.observed import Manifest
from kitestring_operator.rollouts import worker_objects
from kitestring_operator.rollouts.worker_config import worker_config
from kitestring_rollout.worker.config import WorkerConfig
from tests.operator.parts.strict import faults
from tests.operator.rollouts.rendering import (
    CASES,
    WANTED,
    context,
    decoded,
    golden_file,
    golden_text,
    objects_of,
    of_case,
    pod_of,
    pool_of,
)


@pytest.mark.parametrize("case", CASES)
def test_objects_are_those_of_the_golden_file(case: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        golden_file(case).write_text(golden_text(case))
    assert golden_text(case) == golden_file(case).read_text(), "UPDATE_GOLDEN=1 writes the golden files anew"


@pytest.mark.parametrize("case", CASES)
def test_the_kubernetes_api_knows_every_field(case: str) -> None:
    for item in objects_of(of_case(case)):
        assert faults(item) == []


@pytest.mark.parametrize("case", CASES)
def test_the_worker_reads_its_config(case: str) -> None:
    made = of_case(case)
    config = WorkerConfig.model_validate(worker_config(made))
    assert config.run == made.run_id
    assert config.agent_protocol == made.pool.agent_protocol
    assert config.agent.command == tuple(made.pool.template.agent.command)
    assert config.rollout is None


def test_the_worker_of_one_rollout_reads_its_config() -> None:
    (secret,) = [item for item in objects_of(of_case("job")) if item["kind"] == "Secret"]
    data = decoded(secret)
    config = WorkerConfig.model_validate(data["worker.json"])
    assert (config.rollout, config.capacity) == (WANTED.rollout, 1)
    assert data["queueCredential"] == WANTED.credential


def test_limits_reach_the_worker() -> None:
    limits = WorkerConfig.model_validate(worker_config(of_case("loosened"))).limits
    assert (limits.memory_bytes, limits.cpu_seconds, limits.processes, limits.log_bytes) == (512 << 20, 100, 64, 1000)


@pytest.mark.parametrize("case", CASES)
def test_files_are_where_the_worker_looks_for_them(case: str) -> None:
    made = of_case(case)
    spec = pod_of(made)
    (worker,) = [one for one in spec["initContainers"] if one["name"] == "worker"]
    mounts = {one["mountPath"]: one["name"] for one in worker["volumeMounts"]}
    config = worker_config(made)
    for path in (worker["args"][-1], config["queue_credential_file"]):
        folder, _, file = path.rpartition("/")
        (volume,) = [one for one in spec["volumes"] if one["name"] == mounts[folder]]
        source = volume.get("secret") or volume["configMap"]
        assert [item["path"] for item in source["items"]] == [file]
    (agent,) = [one for one in spec["containers"] if one["name"] == "agent"]
    of_agent = {one["mountPath"]: one["name"] for one in agent["volumeMounts"]}
    socket = config["launcher_socket"].rpartition("/")[0]
    assert mounts[socket] == of_agent[socket]
    assert config["launcher_socket"] in agent["command"]
    assert config["scratch_root"] in of_agent
    assert {"name": "health", "containerPort": config["health"]["port"], "protocol": "TCP"} in worker["ports"]


@pytest.mark.parametrize("case", CASES)
def test_the_grace_period_is_longer_than_the_drain(case: str) -> None:
    made = of_case(case)
    grace = pod_of(made)["terminationGracePeriodSeconds"]
    drain = WorkerConfig.model_validate(worker_config(made)).drain_seconds
    assert drain + 30 == grace
    if case != "loosened":
        assert drain == made.pool.limits.seconds


@pytest.mark.parametrize("case", CASES)
def test_pods_are_found_by_the_labels_of_status_and_policy(case: str) -> None:
    made = of_case(case)
    policy, *_, maker = objects_of(made)
    labels = maker["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= policy["spec"]["podSelector"]["matchLabels"].items()
    assert labels[names.LABEL_POOL] == "calculator"
    if maker["kind"] == "Deployment":
        assert labels.items() >= maker["spec"]["selector"]["matchLabels"].items()


def test_isolation_job_has_no_workers() -> None:
    assert [item["kind"] for item in worker_objects(of_case("job"))] == ["NetworkPolicy"]


def _workers(changes: dict[str, Any]) -> Manifest:
    pool = pool_of("worker")
    pool["spec"] |= changes
    return worker_objects(context(pool))[-1]


def test_scaling_changes_the_size_only() -> None:
    before, after = _workers({}), _workers({"replicas": 9})
    assert after["spec"]["replicas"] == 9
    assert after["spec"] | {"replicas": 2} == before["spec"]


def test_workers_with_another_config_are_other_pods() -> None:
    before, after = _workers({}), _workers({"rolloutsPerWorker": 8})
    annotations = [item["spec"]["template"]["metadata"].pop("annotations") for item in (before, after)]
    assert annotations[0] != annotations[1]
    assert before == after
