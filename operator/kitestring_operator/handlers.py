"""kopf: the watches. Every handler passes what it saw on; none decides, patches, retries, or leaves a finalizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import kopf
from kopf._cogs.clients.errors import APIForbiddenError, APINotFoundError

from kitestring_api import names
from kitestring_operator.cluster.cache import EventType
from kitestring_operator.cluster.kinds import KINDS, NOT_OF_WORKERS, RESOURCES, WATCHED, Kind
from kitestring_operator.observed import Manifest

Observe = Callable[[Manifest, EventType | None], None]

KindGoneError: Final = APINotFoundError
"""How kopf ends when the cluster no longer serves a kind that it watches; no public name of kopf's says it."""
MayNotWatchError: Final = APIForbiddenError
"""The same where this process has lost a right, as in a namespace that has gone."""
PAGE: Final = 50
"""Objects in one page of kopf's first list. Whole pods are large, and one page at a time is in memory."""
IDLE_SECONDS: Final = 0.1
"""kopf keeps an object so long after each event of it, whole."""


class _NoDifferences(kopf.DiffBaseStorage):
    """No handler asks what changed in an object, so kopf copies and compares none: a quarter of an event's cost."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[object] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Never called: only handlers of changes have something to remember."""


class _NoEnds(logging.Filter):
    """Without kopf's own tracebacks of the two above: whoever runs kopf says in a line what they mean."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], KindGoneError | MayNotWatchError)


_NO_ENDS: Final = _NoEnds()


def registry(observe: Observe, *, has_kueue: bool) -> kopf.OperatorRegistry:
    """Handlers for events of our resources and of what runs own."""
    found = kopf.OperatorRegistry()
    for name in WATCHED:
        if has_kueue or name != "Workload":
            _watch(found, KINDS[name], observe)
    kopf.on.login(registry=found)(kopf.login_via_client)
    return found


def settings() -> kopf.OperatorSettings:
    """kopf's own settings: short waits, no traces of kopf in the cluster, watches by label."""
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event
    for module in ("orchestration", "running"):
        logging.getLogger(f"kopf._core.reactor.{module}").addFilter(_NO_ENDS)
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.posting.level = logging.WARNING
    found.scanning.disabled = True
    found.peering.standalone = True
    found.networking.request_timeout = 30
    found.networking.connect_timeout = 10
    found.watching.chunk_size = PAGE
    found.queueing.idle_timeout = IDLE_SECONDS
    found.persistence.diffbase_storage = _NoDifferences()
    for kind in (KINDS[name] for name in WATCHED if name not in RESOURCES):
        key = (kind.group, kind.api_version.rpartition("/")[2], kind.plural)
        selectors = [f"{names.LABEL_MANAGED_BY}={names.LABEL_MANAGED_BY_VALUE}"]
        if kind.kind == "Deployment":
            selectors.append(NOT_OF_WORKERS)
        found.watching.label_selectors[key] = ",".join(selectors)
    return found


def _watch(found: kopf.OperatorRegistry, kind: Kind, observe: Observe) -> None:
    async def saw(event: kopf.RawEvent, **_: Any) -> None:
        if event["type"] != "BOOKMARK":
            # the items of a list do not say what they are
            observe({"apiVersion": kind.api_version, "kind": kind.kind} | dict(event["object"]), event["type"])

    version = kind.api_version.rpartition("/")[2]
    kopf.on.event(kind.group, version, kind.plural, registry=found, id=kind.plural)(saw)
