"""Right documents that the tests of the API break in one place each."""

import copy
from typing import Any

RUN: dict[str, Any] = {
    "apiVersion": "kitestring.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "calculator"},
    "spec": {
        "policies": [
            {"name": "policy", "model": {"path": "./model"}, "aliases": ["gpt-4o-mini"]},
            {"name": "judge", "train": False, "endpoint": {"url": "https://models.test/v1", "model": "gpt-x"}},
        ],
        "tasks": {
            "train": {"path": "train.jsonl"},
            "validation": {"path": "validation.jsonl"},
            "hiddenFields": ["answer"],
        },
        "rollouts": {"poolRef": {"name": "calculator"}},
        "trainer": {"device": "cpu"},
        "inference": {"backend": "cpu"},
        "steps": 12,
    },
}

POOL: dict[str, Any] = {
    "apiVersion": "kitestring.dev/v1alpha1",
    "kind": "RolloutPool",
    "metadata": {"name": "calculator"},
    "spec": {
        "template": {
            "spec": {
                "containers": [{"name": "agent", "image": "agent:1", "command": ["python", "agent.py"]}],
            }
        },
        "agentProtocol": {"task": {"from": "stdin", "format": "text", "field": "question"}},
        "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
    },
}


class _Absent:
    """Stands for a field that is left out; its name is the same in every process, so that tests have the same ids."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""As a value of `changed`: take the field away."""


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of `document` with fields set by dotted path, list items by number: {"spec.policies.0.train": False}."""
    copied = copy.deepcopy(document)
    for path, value in changes.items():
        *steps, last = path.split(".")
        place: Any = copied
        for step in steps:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        if value is ABSENT:
            del place[last]
        elif isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return copied
