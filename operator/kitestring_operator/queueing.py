"""Kueue: one Workload for a whole run, so that all of its pods are admitted or none is. Pure.

docs/decisions/0005 says why it is one Workload of our own. Its pod sets are the parts of the run; what Kueue's own
integrations do for Jobs is done here for runs: start on admission, stop on eviction, give the quota back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from kitestring_api import names
from kitestring_api.v1alpha1.reward import Reward
from kitestring_api.v1alpha1.status import Phase
from kitestring_operator import identity
from kitestring_operator.conditions import stamp
from kitestring_operator.lifecycle import Course, Gate, is_pod_bearing, live_pods
from kitestring_operator.observed import Manifest, Observed, Placement, RunContext
from kitestring_operator.pods import condition, condition_entry

API_VERSION: Final = "kueue.x-k8s.io/v1beta2"
_POD_FIELDS: Final = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "overhead",
    "topologySpreadConstraints",
)
"""What of a pod matters to a queue, besides its containers' resources."""
_CONTAINER_FIELDS: Final = ("name", "image", "resources", "restartPolicy")
_JOB_UID: Final = "kueue.x-k8s.io/job-uid"
"""Label by which `kueuectl list workload --for` finds the Workload, and what Kueue says of whoever preempts others."""
_BY_PREEMPTION: Final = ("Preempted", "NodeFailures")
"""Reasons of an eviction after which Kueue queues a workload again at once."""


def gate(observed: Observed) -> Gate:
    """Whether the queue lets the run hold pods. A run that names no queue always may."""
    queue, workload = observed.queue_name, observed.workload
    if queue is None:
        return Gate()
    if observed.is_suspended and condition(workload or {}, "Admitted") != "True":
        message = f"spec.suspend is true: the run is not in queue {queue} until its user resumes it"
        return Gate(False, names.REASON_SUSPEND_REQUESTED, message)
    if workload is None:
        return Gate(False, names.REASON_WAITING_FOR_QUEUE, f"queue {queue} has not seen the run yet")
    if condition(workload, "Evicted") == "True":
        return Gate(
            False, names.REASON_PREEMPTED, f"queue {queue} took the resources back: {_said(workload, 'Evicted')}"
        )
    if condition(workload, "Admitted") == "True":
        return Gate(True, names.REASON_ADMITTED, _admitted(observed, queue))
    said = _said(workload, "QuotaReserved")
    return Gate(False, names.REASON_WAITING_FOR_QUEUE, f"waiting for queue {queue}" + (f": {said}" if said else ""))


# --- The Workload -------------------------------------------------------------------------------------------------


def workload_of(context: RunContext, objects: Iterable[Manifest], priority: int | None) -> Manifest:
    """The Workload of a run that consists of these objects. `priority`: value of the class that the run names."""
    scheduling = context.spec.scheduling
    spec: dict[str, Any] = {"queueName": scheduling.queue_name, "podSets": _pod_sets(objects)}
    if scheduling.priority_class_name is not None and priority is not None:
        name = scheduling.priority_class_name
        spec["priorityClassRef"] = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": name}
        spec["priority"] = priority
    return {
        "apiVersion": API_VERSION,
        "kind": "Workload",
        "metadata": identity.metadata(context, context.name, further={_JOB_UID: context.uid}),
        "spec": spec,
    }


def may_change(workload: Manifest | None) -> bool:
    """Whether its pod sets may still be others: not while quota is set aside for them."""
    return workload is None or condition(workload, "QuotaReserved") != "True"


def pod_set_names(objects: Iterable[Manifest]) -> dict[str, str]:
    """The pod set of each object that makes pods, by the object's name.

    Objects of one part share a set where their pods weigh the same; any other is a set of its own, since Kueue counts
    each pod of a set as its template says. The first set of a part has the part's name.
    """
    return {item["metadata"]["name"]: name for name, items in _grouped(objects) for item in items}


def _pod_sets(objects: Iterable[Manifest]) -> list[dict[str, Any]]:
    """Kueue takes eight at the most, and says so where there are more."""
    return [
        {
            "name": name,
            "count": sum(int(item["spec"].get(identity.SIZE[item["kind"]], 1)) for item in items),
            "template": _weight(items[0]["spec"]["template"]),
        }
        for name, items in _grouped(objects)
    ]


def _grouped(objects: Iterable[Manifest]) -> list[tuple[str, list[Manifest]]]:
    """Objects that make pods, by the names of their sets."""
    parts: dict[str, dict[str, list[Manifest]]] = {}
    for item in objects:
        if item["kind"] in identity.SIZE:
            weight = _weight(item["spec"]["template"])["spec"]
            weight.pop("topologySpreadConstraints", None)  # its labels name the object
            alike = parts.setdefault(_part(item), {})
            alike.setdefault(json.dumps(weight, sort_keys=True), []).append(item)
    return [
        (part if number == 1 else f"{part}-{number}", items)
        for part, alike in parts.items()
        for number, items in enumerate(alike.values(), 1)
    ]


def _part(item: Manifest) -> str:
    return str(item["metadata"]["labels"][names.LABEL_COMPONENT])


def _weight(template: Manifest) -> dict[str, Any]:
    """What a queue must know of a pod, and no more."""
    spec = template["spec"]
    weighed = {field: spec[field] for field in _POD_FIELDS if field in spec}
    for where in ("initContainers", "containers"):
        if spec.get(where):
            weighed[where] = [
                {field: container[field] for field in _CONTAINER_FIELDS if field in container}
                for container in spec[where]
            ]
    return {"spec": weighed}


# --- What was admitted --------------------------------------------------------------------------------------------


def admitted_counts(workload: Manifest | None) -> dict[str, int]:
    """How many pods of each part were admitted; empty before an admission."""
    return {entry["name"]: int(entry["count"]) for entry in _assignments(workload) if entry.get("count") is not None}


def flavors_of(workload: Manifest | None) -> frozenset[str]:
    """The resource flavors that were assigned to any part."""
    return frozenset(flavor for entry in _assignments(workload) for flavor in (entry.get("flavors") or {}).values())


def within_admission(context: RunContext, workload: Manifest | None) -> RunContext:
    """No more pods of a part than were admitted: what was added since waits for the next admission."""
    counts = admitted_counts(workload)
    if not counts:
        return context
    spec, pool = context.spec, context.pool
    admitted = sum(count for name, count in counts.items() if name.startswith(names.COMPONENT_POLICY_SERVER))
    each = admitted // max(1, len(spec.trained_policies))
    servers = min(spec.inference.replicas, max(1, each)) if admitted else spec.inference.replicas
    gateways = min(spec.gateway.replicas, max(1, counts.get(names.COMPONENT_GATEWAY, spec.gateway.replicas)))
    workers = min(pool.replicas, counts.get(names.COMPONENT_ROLLOUT, pool.replicas))
    return replace(
        context,
        spec=spec.model_copy(
            update={
                "inference": spec.inference.model_copy(update={"replicas": servers}),
                "gateway": spec.gateway.model_copy(update={"replicas": gateways}),
            }
        ),
        pool=pool.model_copy(update={"replicas": workers, "reward": _scorers_within(pool.reward, counts)}),
    )


def _scorers_within(reward: Reward, counts: Mapping[str, int]) -> Reward:
    if reward.scorer is None:
        return reward
    scorers = min(reward.scorer.replicas, max(1, counts.get(names.COMPONENT_SCORER, reward.scorer.replicas)))
    return reward.model_copy(update={"scorer": reward.scorer.model_copy(update={"replicas": scorers})})


def placed(item: Manifest, pod_sets: Mapping[str, str], observed: Observed) -> Manifest:
    """An object with its pods where the queue wants them: labels of nodes and tolerations of the assigned flavors, and
    what admission checks add. `pod_sets`: by `pod_set_names`; an object that is not in them is of its part's first."""
    if item["kind"] not in identity.SIZE or observed.workload is None:
        return item
    placements = _placements(pod_sets.get(item["metadata"]["name"], _part(item)), observed)
    if not placements:
        return item
    item = item | {"spec": item["spec"] | {"template": deepcopy(item["spec"]["template"])}}
    template = item["spec"]["template"]
    for placement in placements:
        template["spec"]["nodeSelector"] = dict(placement.node_labels) | (template["spec"].get("nodeSelector") or {})
        tolerations = template["spec"].setdefault("tolerations", [])
        tolerations += [dict(entry) for entry in placement.tolerations if entry not in tolerations]
        annotations = template["metadata"].get("annotations") or {}
        template["metadata"]["annotations"] = dict(placement.annotations) | annotations
        template["metadata"]["labels"] = dict(placement.labels) | (template["metadata"].get("labels") or {})
    return item


def _placements(pod_set: str, observed: Observed) -> list[Placement]:
    found = []
    for entry in _assignments(observed.workload):
        if entry["name"] == pod_set:
            flavors = sorted(set((entry.get("flavors") or {}).values()))
            found += [observed.flavors[flavor] for flavor in flavors if flavor in observed.flavors]
    status = (observed.workload or {}).get("status") or {}
    for check in status.get("admissionChecks") or ():
        for update in check.get("podSetUpdates") or ():
            if update.get("name") == pod_set:
                found.append(
                    Placement(
                        update.get("nodeSelector") or {},
                        tuple(update.get("tolerations") or ()),
                        update.get("annotations") or {},
                        update.get("labels") or {},
                    )
                )
    return found


def _assignments(workload: Manifest | None) -> Sequence[Mapping[str, Any]]:
    status = (workload or {}).get("status") or {}
    assignments: Sequence[Mapping[str, Any]] = (status.get("admission") or {}).get("podSetAssignments") or ()
    return assignments


# --- What Kueue is told -------------------------------------------------------------------------------------------


def is_over(observed: Observed, course: Course, *, is_refused: bool) -> bool:
    """Whether the Workload goes: the run names no queue any more, was suspended by its user, or is refused before it
    has started, until somebody corrects it. Not because the models refuse the spec of one that has: its pods go on, and
    so does their quota."""
    if observed.workload is None or course.phase.is_final:
        return False
    if course.phase is Phase.PENDING and is_refused:
        return not _holds_quota(observed)
    return course.phase is Phase.SUSPENDED or (observed.spec is not None and observed.queue_name is None)


def word_to_kueue(observed: Observed, course: Course) -> dict[str, Any] | None:
    """A patch of the Workload's status; None: Kueue knows all.

    When the run has ended, that it is finished. When it was evicted and its last pod is gone, that the quota is free.
    Otherwise, whether its pods are ready. The patch holds for the version that was observed.
    """
    workload = observed.workload
    if workload is None or condition(workload, "Finished") == "True":
        return None
    is_held = _holds_quota(observed)
    if course.phase.is_final:
        reason = "Succeeded" if course.phase is Phase.SUCCEEDED else "Failed"
        return None if is_held else _patch(workload, [("Finished", "True", reason, course.message)], observed.now)
    evicted = condition_entry(workload, "Evicted")
    if evicted is not None and evicted.get("status") == "True":
        is_free = condition(workload, "QuotaReserved") != "True"
        return None if is_held or is_free else _quota_back(workload, evicted, observed.now)
    ready = "True" if course.phase is Phase.RUNNING else "False"
    if condition(workload, "Admitted") != "True" or condition(workload, "PodsReady") == ready:
        return None
    reason = "Started" if ready == "True" else "WaitForStart"
    return _patch(workload, [("PodsReady", ready, reason, course.message)], observed.now)


def _holds_quota(observed: Observed) -> bool:
    return bool(live_pods(observed)) or any(map(is_pod_bearing, observed.objects))


def _quota_back(workload: Manifest, evicted: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """As Kueue does it for its own integrations: the Workload is queued again, or waits for what deactivated it."""
    why, said = str(evicted.get("reason", "")), str(evicted.get("message", ""))
    again = "True" if why.startswith(_BY_PREEMPTION) else "False"
    told = [
        ("QuotaReserved", "False", "Pending", said),
        ("Admitted", "False", "NoReservation", "The workload has no reservation"),
        ("Requeued", again, why or "Evicted", said),
    ]
    patch = _patch(workload, told, now)
    patch["status"]["admission"] = None
    return patch


def _patch(workload: Manifest, told: Sequence[tuple[str, str, str, str]], now: datetime) -> dict[str, Any]:
    metadata = workload["metadata"]
    types = {kind for kind, *_ in told}
    kept = [entry for entry in (workload.get("status") or {}).get("conditions") or () if entry["type"] not in types]
    new = [
        {
            "type": kind,
            "status": holds,
            "reason": reason,
            "message": message[:1024],
            "lastTransitionTime": stamp(now),
            "observedGeneration": metadata.get("generation", 0),
        }
        for kind, holds, reason, message in told
    ]
    return {
        "metadata": {"resourceVersion": metadata["resourceVersion"]},
        "status": {"conditions": [*kept, *new]},
    }


def _said(workload: Manifest, kind: str) -> str:
    return str((condition_entry(workload, kind) or {}).get("message", ""))


def _admitted(observed: Observed, queue: str) -> str:
    admitted = admitted_counts(observed.workload).get(names.COMPONENT_ROLLOUT)
    wanted = None if observed.pool is None else observed.pool.spec.replicas
    if admitted is not None and wanted is not None and wanted > admitted:
        return (
            f"admitted by queue {queue} with {admitted} of {wanted} workers: those added since wait until the run is "
            "suspended and resumed"
        )
    return f"admitted by queue {queue}"
