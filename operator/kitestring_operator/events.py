"""Events under a resource, for its user: one object for each thing said, counted when it is said again."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from kitestring_api import names
from kitestring_operator.cluster.errors import ClusterError
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.conditions import stamp
from kitestring_operator.observed import Event, Manifest

REMEMBERED: Final = 2048
"""Events whose count is known; the cluster forgets them after an hour."""
QUIET_SECONDS: Final = 60.0
"""The same is not said again before so long."""

log = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


class Events:
    """Says what happened. A failure to say it is logged and does no harm."""

    def __init__(self, cluster: Cluster, reporter: str, now: Callable[[], datetime] = _now) -> None:
        self._cluster = cluster
        self._reporter = reporter
        self._now = now
        self._said: OrderedDict[str, tuple[datetime, datetime, int]] = OrderedDict()
        """Name of the event → first time, last time, count."""

    async def say(self, about: Manifest, event: Event) -> None:
        """Post `event` under a resource, or count it once more."""
        metadata = about["metadata"]
        name = _name(about, event)
        now = self._now()
        first, last, count = self._said.get(name, (now, now, 0))
        if count and (now - last).total_seconds() < QUIET_SECONDS:
            return
        self._said[name] = (first, now, count + 1)
        self._said.move_to_end(name)
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        manifest: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message,
            "count": count + 1,
            "firstTimestamp": stamp(first),
            "lastTimestamp": stamp(now),
            "source": {"component": names.LABEL_MANAGED_BY_VALUE},
            "reportingComponent": names.LABEL_MANAGED_BY_VALUE,
            "reportingInstance": self._reporter,
        }
        try:
            await self._cluster.apply(manifest)
        except ClusterError as error:
            log.warning("%s", error)


def _name(about: Manifest, event: Event) -> str:
    """The same for the same words about the same resource."""
    text = "\n".join((about["metadata"]["uid"], event.type, event.reason, event.message))
    return f"{about['metadata']['name']}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
