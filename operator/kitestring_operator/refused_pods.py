"""Pods that the API server does not let be made: a quota without room, Pod Security, a class or an account not there.

Whatever makes pods is taken all the same. A Deployment then says so in a condition, a Job and a StatefulSet in events
alone, which are asked for where pods are lacking for a while.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Final

from kitestring_api import names
from kitestring_operator.cluster.errors import ClusterError
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.identity import SIZE
from kitestring_operator.observed import Manifest, Observed
from kitestring_operator.pods import condition, condition_entry, controller_uid, parse_time
from kitestring_operator.trainer_job import ENDED

PATIENCE: Final = timedelta(seconds=30)
"""What makes pods may lack some for so long after its start before anything is asked."""
MESSAGE_LENGTH: Final = 1024
ASKED: Final = 3
"""Objects of one part whose events are asked for in one look: of many that lack pods, most have the same cause."""
_FAILED: Final = "FailedCreate"
"""Reason of the events by which Kubernetes' controllers say that they could not make a pod."""

log = logging.getLogger(__name__)


class RefusedPods:
    """Finds out why pods of a run are not there. What was asked is remembered until the next resync."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._said: dict[str, str] = {}
        """By uid of a Job or StatefulSet; empty: nothing was."""

    async def of(self, observed: Observed) -> dict[str, str]:
        """By part of the run (names.COMPONENT_*): which object lacks pods, and why. One object of each is enough."""
        found: dict[str, str] = {}
        asked: Counter[str] = Counter()
        pods: Counter[str | None] | None = None
        for item in _may_lack(observed):
            labels, uid = item["metadata"].get("labels") or {}, item["metadata"]["uid"]
            component = str(labels.get(names.LABEL_COMPONENT))
            if component in found or asked[component] >= ASKED:
                continue
            if item["kind"] == "Deployment":
                said = str((condition_entry(item, "ReplicaFailure") or {}).get("message", ""))
                found[component] = _words(item, said)
                continue
            if pods is None:
                pods = Counter(controller_uid(pod) for pod in observed.of_kind("Pod"))
            if pods[uid] < _size(item):
                asked[component] += 1
                said = await self._asked(item, pods[uid])
                if said:
                    found[component] = said
        return found

    def resynced(self) -> None:
        """Everything was listed: what was said before is asked for again."""
        self._said.clear()

    async def _asked(self, item: Manifest, pods: int) -> str:
        metadata = item["metadata"]
        uid = metadata["uid"]
        if uid not in self._said:
            try:
                said = await self._cluster.latest_event(metadata["namespace"], uid, _FAILED)
                self._said[uid] = _words(item, said) if said else ""
            except ClusterError as error:
                log.warning("%s", error)
                what = f"{item['kind']} {metadata['name']}"
                hint = f"kubectl describe -n {metadata['namespace']} {item['kind'].lower()} {metadata['name']} says why"
                self._said[uid] = f"{what} has {pods} of {_size(item)} pods; {hint}"
        return self._said[uid]


def _words(item: Manifest, said: str) -> str:
    what = f"{item['kind']} {item['metadata']['name']}"
    return f"{what} cannot have its pods: {' '.join(said.split())}"[:MESSAGE_LENGTH]


def _size(item: Manifest) -> int:
    return int((item.get("spec") or {}).get(SIZE[item["kind"]], 1))


def _may_lack(observed: Observed) -> Iterator[Manifest]:
    """What has fewer pods than it is to have, by its own status."""
    for kind in SIZE:
        for item in observed.of_kind(kind):
            if "deletionTimestamp" in item["metadata"]:
                continue
            if kind == "Deployment":
                if condition(item, "ReplicaFailure") == "True":
                    yield item
                continue
            status: Mapping[str, object] = item.get("status") or {}
            if _made(status) >= _size(item):
                continue
            since = parse_time(status.get("startTime")) or parse_time(item["metadata"].get("creationTimestamp"))
            is_young = since is None or observed.now - since < PATIENCE
            if not is_young and not _is_at_rest(item):
                yield item


def _is_at_rest(item: Manifest) -> bool:
    """Whether a Job has ended, or something keeps it from beginning."""
    is_suspended = bool((item.get("spec") or {}).get("suspend"))
    return item["kind"] == "Job" and (is_suspended or any(condition(item, kind) == "True" for kind in ENDED))


def _made(status: Mapping[str, object]) -> int:
    """Pods that a Job or a StatefulSet counts as made."""
    made = 0
    for field in ("replicas", "active", "succeeded", "failed"):
        count = status.get(field)
        if isinstance(count, int):
            made += count
    return made
