"""What the status of a RolloutPool says: all runs that use it, summed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from kitestring_api import names
from kitestring_api.v1alpha1.status import ConditionType, Phase
from kitestring_operator.observed import Manifest
from kitestring_operator.pods import condition_entry, is_ready

USERS: Final = 64
"""Names in `status.users`; `status.runs` counts all."""
_FINAL: Final = frozenset(phase.value for phase in Phase if phase.is_final)


def pool_status(
    pool: Manifest, runs: Iterable[Manifest], objects: Sequence[Manifest], problems: Sequence[str], now: datetime
) -> dict[str, Any]:
    """The whole status of `pool`.

    `runs` are the TrainingRuns of its namespace, `objects` the Deployments, Jobs and pods there that carry its label
    (LABEL_POOL); others are passed over. `problems` say what of the pool cannot be carried out, a line each. From the
    same state always the same status: a condition keeps its time while its status stays.
    """
    users = sorted(str(run["metadata"]["name"]) for run in runs if _refers_to(run, pool) and is_under_way(run))
    mine = [item for item in objects if _is_of(item, pool)]
    pods = [item for item in mine if item["kind"] == "Pod" and _is_there(item)]
    return {
        "observedGeneration": int(pool["metadata"].get("generation", 0)),
        "replicas": len(pods),
        "readyReplicas": sum(is_ready(pod) for pod in pods),
        "runs": len(users),
        "users": users[:USERS],
        "selector": selector(pool),
        "conditions": [_accepted(pool, problems, now)],
    }


def selector(pool: Manifest) -> str:
    """Label selector of the pods of all runs that use the pool, for `scale` and for autoscalers."""
    labels = {names.LABEL_COMPONENT: names.COMPONENT_ROLLOUT, names.LABEL_POOL: pool["metadata"]["name"]}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _refers_to(run: Manifest, pool: Manifest) -> bool:
    metadata, reference = pool["metadata"], ((run.get("spec") or {}).get("rollouts") or {}).get("poolRef") or {}
    return bool(run["metadata"]["namespace"] == metadata["namespace"] and reference.get("name") == metadata["name"])


def is_under_way(run: Manifest) -> bool:
    """Whether it has started and has not ended: for such runs most of the pool's spec is fixed. One that was refused,
    or waits for a queue, has nothing of it yet."""
    status = run.get("status") or {}
    return "startTime" in status and status.get("phase") not in _FINAL


def _is_of(item: Manifest, pool: Manifest) -> bool:
    metadata, labels = item["metadata"], item["metadata"].get("labels") or {}
    return bool(
        metadata["namespace"] == pool["metadata"]["namespace"]
        and labels.get(names.LABEL_POOL) == pool["metadata"]["name"]
        and labels.get(names.LABEL_COMPONENT) == names.COMPONENT_ROLLOUT
    )


def _is_there(pod: Manifest) -> bool:
    """Whether the pod works or will: one that ended or drains is no replica, as with Kubernetes' own workloads."""
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not ended and "deletionTimestamp" not in pod["metadata"]


def _accepted(pool: Manifest, problems: Sequence[str], now: datetime) -> dict[str, Any]:
    status = "False" if problems else "True"
    before: Mapping[str, Any] = condition_entry(pool, ConditionType.ACCEPTED) or {}
    same = before.get("status") == status
    return {
        "type": ConditionType.ACCEPTED.value,
        "status": status,
        "observedGeneration": int(pool["metadata"].get("generation", 0)),
        "lastTransitionTime": before["lastTransitionTime"] if same else now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "reason": names.REASON_INVALID_SPEC if problems else names.REASON_ACCEPTED,
        "message": "\n".join(problems)[:4096],
    }
