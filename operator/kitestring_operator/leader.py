"""Which of several operators acts: a Lease, renewed while its holder lives. Whoever does not hold it writes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from kitestring_operator.cluster.errors import AlreadyExistsError, ClusterError, ConflictError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Manifest
from kitestring_operator.settings import LeaderElection

MARGIN: Final = 0.75
"""Share of the lease's time for which its holder acts without having renewed it: clocks and requests differ."""

log = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """This process held the lease and does no longer: it must end."""


class Leader:
    """The lease of one process. `may_act` may be asked from any thread; everything else belongs to the event loop.

    `cluster` is one whose writes are not fenced by this lease.
    """

    def __init__(
        self,
        cluster: Cluster,
        election: LeaderElection,
        *,
        namespace: str,
        identity: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._election = election
        self._ref = KINDS["Lease"].ref(namespace, election.lease_name)
        self._identity = identity
        self._metrics = metrics
        self._clock = clock
        self._held_until: float | None = None
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self.transitions: int | None = None
        """How often the lease has changed hands: the number of this term."""
        self.heard_at = clock()
        """When the API server last answered."""

    def may_act(self) -> bool:
        """Whether this process may still write: the time since the last renewal decides, no request is needed."""
        return self._held_until is not None and self._clock() < self._held_until

    async def acquire(self) -> None:
        """Wait until this process holds the lease."""
        while not await self._try():  # noqa: ASYNC110 -- nothing tells of a lease that is free but asking
            await asyncio.sleep(self._election.renew_seconds)
        self._metrics.is_leader.set(1)
        log.info("holds lease %s/%s, term %s", self._ref.namespace, self._ref.name, self.transitions)

    async def keep(self) -> None:
        """Renew until cancelled. LeaseLostError when another holds it, or when it could not be renewed in time."""
        while True:
            await asyncio.sleep(self._election.renew_seconds)
            if not await self._try() and not self.may_act():
                self._metrics.is_leader.set(0)
                raise LeaseLostError(f"lease {self._ref.namespace}/{self._ref.name} is lost; this process ends")

    async def release(self) -> None:
        """Give the lease back, so that another need not wait for its end."""
        if not self.may_act():
            return
        self._held_until = None
        self._metrics.is_leader.set(0)
        try:
            lease = await self._cluster.get(self._ref)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                await self._cluster.update(lease | {"spec": lease["spec"] | {"holderIdentity": ""}})
        except ClusterError as error:
            log.warning("releasing the lease: %s", error)

    async def _try(self) -> bool:
        """Take or renew the lease. False: another holds it, or the API server does not answer."""
        asked_at = self._clock()
        try:
            lease = await self._cluster.get(self._ref)
            self.heard_at = self._clock()
            if lease is None:
                await self._cluster.create(self._lease(None))
                transitions = 0
            elif self._is_free(lease):
                made = self._lease(lease)
                await self._cluster.update(made)
                transitions = made["spec"]["leaseTransitions"]
            else:
                if self._held_until is not None:
                    self._held_until = None
                    log.error("lease %s is held by %s", self._ref.name, lease["spec"].get("holderIdentity"))
                return False
        except (ConflictError, AlreadyExistsError):
            return False
        except ClusterError as error:
            log.warning("lease: %s", error)
            return False
        self.transitions = transitions
        self._held_until = asked_at + self._election.lease_seconds * MARGIN
        return True

    def _is_free(self, lease: Manifest) -> bool:
        """Ours, given back, or not renewed for its whole time by our own clock: clocks of machines differ."""
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") in (None, "", self._identity):
            return True
        version = (str(spec["holderIdentity"]), str(lease["metadata"]["resourceVersion"]))
        if version != self._seen:
            self._seen, self._seen_at = version, self._clock()
        return self._clock() - self._seen_at > float(spec.get("leaseDurationSeconds") or self._election.lease_seconds)

    def _lease(self, before: Manifest | None) -> Manifest:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: dict[str, Any] = {} if before is None else before.get("spec") or {}
        spec: dict[str, Any] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._election.lease_seconds,
            "renewTime": now,
            "acquireTime": old.get("acquireTime") or now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0),
        }
        if before is not None and old.get("holderIdentity") != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": spec["leaseTransitions"] + 1}
        metadata = {"name": self._ref.name, "namespace": self._ref.namespace} if before is None else before["metadata"]
        return {"apiVersion": self._ref.api_version, "kind": "Lease", "metadata": metadata, "spec": spec}
