"""Runs, pools and settings for tests, as the cluster would show them."""

from __future__ import annotations

import copy
from typing import Any

from bench.operator.documents import IMAGES
from kitestring_api import names
from kitestring_operator.settings import Settings

NAMESPACE = "team-a"
RUN_UID = "11111111-0000-4000-8000-000000000001"

SETTINGS = Settings(
    images=IMAGES,
    poll_seconds=0.05,
    resync_seconds=3600.0,
)

_POOL: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": names.KIND_ROLLOUT_POOL,
    "metadata": {"name": "calc", "namespace": NAMESPACE, "generation": 1},
    "spec": {
        "replicas": 2,
        "template": {"spec": {"containers": [{"name": "agent", "image": "agent:1", "command": ["python", "a.py"]}]}},
        "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
    },
}
_RUN: dict[str, Any] = {
    "apiVersion": names.API_VERSION,
    "kind": names.KIND_TRAINING_RUN,
    "metadata": {"name": "calculator", "namespace": NAMESPACE, "generation": 1},
    "spec": {
        "policies": [{"name": "policy", "model": {"path": "./model"}}],
        "tasks": {"train": {"path": "./train.jsonl"}, "hiddenFields": ["answer"]},
        "rollouts": {"poolRef": {"name": "calc"}, "groupSize": 4, "tasksPerStep": 2},
        "trainer": {"backend": "collect", "device": "cpu"},
        "inference": {"backend": "cpu"},
        "traces": {"collector": {"kind": "builtin"}},
        "storage": {
            "bucket": "runs",
            "endpoint": "http://storage:8333",
            "credentialsSecretRef": {"name": "storage-keys"},
        },
        "steps": 3,
    },
}


def run(name: str = "calculator", **spec: Any) -> dict[str, Any]:
    """A TrainingRun; `spec` replaces fields of its spec."""
    document = copy.deepcopy(_RUN)
    document["metadata"]["name"] = name
    document["spec"] |= spec
    return document


def pool(**spec: Any) -> dict[str, Any]:
    """A RolloutPool; `spec` replaces fields of its spec."""
    document = copy.deepcopy(_POOL)
    document["spec"] |= spec
    return document


def storage_secret() -> dict[str, Any]:
    """The Secret that `run()` names."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "storage-keys", "namespace": NAMESPACE},
        "data": {"accessKeyId": "aWQ=", "secretAccessKey": "a2V5"},
    }
