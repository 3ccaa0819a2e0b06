"""Kueue: one Workload for a whole run. Pure."""

from __future__ import annotations

from kitestring_api import names
from kitestring_operator.lifecycle import Gate
from kitestring_operator.observed import Observed
from kitestring_operator.pods import condition, condition_entry


def gate(observed: Observed) -> Gate:
    """Whether the queue lets the run hold pods. A run that names no queue always may."""
    spec = observed.spec
    if spec is None or spec.scheduling.queue_name is None:
        return Gate()
    queue = spec.scheduling.queue_name
    workload = observed.workload
    if workload is None:
        return Gate(False, names.REASON_WAITING_FOR_QUEUE, f"queue {queue} has not seen the run yet")
    if condition(workload, "Evicted") == "True":
        said = str((condition_entry(workload, "Evicted") or {}).get("message", ""))
        return Gate(False, names.REASON_PREEMPTED, f"queue {queue} took the resources back: {said}")
    if condition(workload, "Admitted") == "True":
        return Gate(True, names.REASON_ADMITTED, f"admitted by queue {queue}")
    said = str((condition_entry(workload, "QuotaReserved") or {}).get("message", ""))
    return Gate(False, names.REASON_WAITING_FOR_QUEUE, f"waiting for queue {queue}" + (f": {said}" if said else ""))
