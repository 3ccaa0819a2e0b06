"""Runs, their pools and storage keys as a user applies them, and the settings of the operator."""

from __future__ import annotations

from typing import Any, Literal

from kitestring_api import names
from kitestring_operator.observed import Manifest
from kitestring_operator.settings import Images, LeaderElection, Settings

NAMESPACE = "bench"
STORAGE_KEYS = "storage-keys"
IMAGES = Images(
    operator="kitestring/operator:1",
    rollout="kitestring/rollout:1",
    trainer="kitestring/trainer:1",
    policy_server_cpu="kitestring/policy-server-cpu:1",
    policy_server_vllm="vllm/vllm-openai:1",
    collector_contrib="otel/opentelemetry-collector-contrib:1",
)


def settings(*, resync_seconds: float, poll_seconds: float = 2.0) -> Settings:
    """Those of the chart; `resync_seconds` says how often everything is listed and looked at."""
    return Settings(
        images=IMAGES,
        # longer than the chart's: on a machine that does other things too, no operator is to lose its turn
        leader_election=LeaderElection(namespace=NAMESPACE, lease_seconds=120),
        resync_seconds=resync_seconds,
        poll_seconds=poll_seconds,
    )


def pool(name: str, replicas: int, isolation: Literal["Worker", "Job"] = "Worker") -> Manifest:
    """A RolloutPool."""
    container = {"name": "agent", "image": "registry.example/calculator:1.4.2", "command": ["python", "agent.py"]}
    spec = {
        "replicas": replicas,
        "isolation": isolation,
        "template": {"spec": {"containers": [container]}},
        "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
    }
    return _object(names.KIND_ROLLOUT_POOL, name, spec)


def run(name: str, pool_name: str) -> Manifest:
    """A TrainingRun on CPU that uses a pool."""
    spec = {
        "policies": [{"name": "policy", "model": {"path": "./model"}}],
        "tasks": {"train": {"path": "./train.jsonl"}, "hiddenFields": ["answer"]},
        "rollouts": {"poolRef": {"name": pool_name}, "groupSize": 8, "tasksPerStep": 32},
        "trainer": {"backend": "collect", "device": "cpu"},
        "inference": {"backend": "cpu"},
        "traces": {"collector": {"kind": "builtin"}},
        "storage": {
            "bucket": "runs",
            "endpoint": "http://storage:8333",
            "credentialsSecretRef": {"name": STORAGE_KEYS},
        },
        "steps": 1000,
    }
    return _object(names.KIND_TRAINING_RUN, name, spec)


def storage_keys() -> Manifest:
    """The Secret that `run` names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": STORAGE_KEYS, "namespace": NAMESPACE},
        "data": {"accessKeyId": "aWQ=", "secretAccessKey": "a2V5"},
    }


def _object(kind: str, name: str, spec: dict[str, Any]) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }
