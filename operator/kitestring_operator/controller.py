"""The loop: a change is seen, its run is looked at as a whole, and what must be different is made so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_operator import garbage, rollouts
from kitestring_operator.cluster.cache import EventType, ObjectCache, RunKey, run_of
from kitestring_operator.cluster.errors import ClusterError, NotLeadingError
from kitestring_operator.cluster.kinds import KINDS, LISTED, RESOURCES, WATCHED
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.desired import desired
from kitestring_operator.effects import Effects
from kitestring_operator.memory import RunMemory
from kitestring_operator.metrics import Metrics
from kitestring_operator.observation import Observation
from kitestring_operator.observed import Event, Manifest, ObjectRef
from kitestring_operator.served import NamespacesChangedError, is_lost
from kitestring_operator.settings import Settings
from kitestring_operator.work_queue import WorkQueue

WORKERS: Final = 4
"""Resources that are looked at side by side; the decisions themselves take turns."""
LISTS: Final = 3
"""Kinds that are listed side by side: as many pages are in memory at once."""
SECOND_LIST_SECONDS: Final = 30.0
"""Everything is listed again so long after the first time: of what went before they had begun, no watch tells."""
POD_EVENTS_SECONDS: Final = 0.5
"""Changes of pods are gathered for so long: they come by the thousand."""
WORKER_EVENTS_SECONDS: Final = 5.0
"""The same of workers, but for those that go: what a status says of them may be as late."""
POOL_SECONDS: Final = 2.0
"""The same for the status of a pool, which whoever scales it looks at."""

_SELECTOR: Final = f"{names.LABEL_MANAGED_BY}={names.LABEL_MANAGED_BY_VALUE}"

log = logging.getLogger(__name__)


class KindsChangedError(Exception):
    """The cluster serves other kinds than when this process began to watch."""


class Key(NamedTuple):
    """A resource of ours."""

    kind: str
    namespace: str
    name: str

    @property
    def ref(self) -> ObjectRef:
        return KINDS[self.kind].ref(self.namespace, self.name)


class Controller:
    """Keeps runs and pools as they are to be. It belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        cache: ObjectCache,
        effects: Effects,
        *,
        metrics: Metrics,
        has_kueue: bool,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._cache = cache
        self._effects = effects
        self._metrics = metrics
        self._has_kueue = has_kueue
        self._kinds = [kind for kind in (*WATCHED, *LISTED) if has_kueue or kind != "Workload"]
        self._observation = Observation(cluster, cache)
        self._queue: WorkQueue[Key] = WorkQueue(metrics.queue_length.set)
        self._memory: dict[RunKey, RunMemory] = {}
        self._begun: dict[Key, float] = {}
        """What is being looked at, and since when."""
        self.heard_at = time.monotonic()
        """When the cluster last said anything."""
        self.is_synced = False
        """Whether all that was there at the start has been seen."""
        self.looked_at_all = asyncio.Event()
        """Whether all that was seen at the start has been looked at once."""

    # --- What is seen ---------------------------------------------------------------------------------------------

    def observe(self, manifest: Manifest, event: EventType | None) -> None:
        """Take in an event of a watch. Nothing is done here but noting whom it concerns."""
        self.heard_at = time.monotonic()
        self._metrics.watch_events.labels(manifest["kind"]).inc()
        if self._cache.observe(manifest, event):
            self._concerns(manifest)

    async def resync(self) -> None:
        """List everything and look at every resource: what the watches may have missed."""
        at_once = asyncio.Semaphore(LISTS)
        listed = await asyncio.gather(*(self._relist(kind, at_once) for kind in self._kinds), return_exceptions=True)
        problems = [problem for problem in listed if problem is not None]
        if problems:
            # a bug before a cluster's answer
            raise min(problems, key=lambda problem: isinstance(problem, ClusterError))
        self.heard_at = time.monotonic()
        self.is_synced = True
        for memory in self._memory.values():
            memory.refused = None
        uids = {manifest["metadata"]["uid"] for kind in RESOURCES for manifest in self._cache.of_kind(kind)}
        self._observation.resynced(uids)
        self._effects.resynced(uids)
        for kind in RESOURCES:
            for manifest in self._cache.of_kind(kind):
                self._queue.add(_key(manifest))
        if not self._queue:
            self.looked_at_all.set()
        self._count()

    async def _relist(self, kind: str, at_once: asyncio.Semaphore) -> None:
        async with at_once:
            before = self._cache.versions(kind)
            listed = []
            for namespace in self._settings.namespaces or (None,):
                listed += await self._cluster.list(kind, namespace, "" if kind in RESOURCES else _SELECTOR)
            for changed in self._cache.replace(kind, listed, before):
                self._concerns(changed)

    async def keep_in_sync(self) -> None:
        """Resync again and again, until cancelled. A failure waits for the next time.

        Raises KindsChangedError, NamespacesChangedError.
        """
        wait = min(SECOND_LIST_SECONDS, self._settings.resync_seconds)
        while True:
            garbage.spare_what_is_kept()
            await asyncio.sleep(wait)
            wait = self._settings.resync_seconds
            try:
                if await self._cluster.serves("Workload") != self._has_kueue:
                    change = "removed: this process ends, the next one goes on without it"
                    if not self._has_kueue:
                        change = "installed: this process ends, the next one watches it"
                    raise KindsChangedError(f"Kueue has been {change}")
                await self.resync()
            except ClusterError as error:
                if self._settings.namespaces and is_lost(error):
                    why = "this process ends, the next one serves the namespaces in which it has rights"
                    raise NamespacesChangedError(f"{error}: {why}") from error
                log.warning("resync: %s", error)

    def trainer_said(self, run: RunKey) -> None:
        """A trainer said something new."""
        self._queue.add(Key(names.KIND_TRAINING_RUN, *run))

    def memory_of(self, run: RunKey, uid: str) -> RunMemory:
        """What is remembered of the run with this uid."""
        memory = self._memory.get(run)
        if memory is None or memory.uid != uid:
            memory = self._memory[run] = RunMemory(uid)
        return memory

    def _concerns(self, manifest: Manifest) -> None:
        kind, metadata = manifest["kind"], manifest["metadata"]
        if kind == names.KIND_TRAINING_RUN:
            self._queue.add(_key(manifest))
            self._queue.add_after(Key(names.KIND_ROLLOUT_POOL, metadata["namespace"], _pool_name(manifest)), 0.1)
        elif kind == names.KIND_ROLLOUT_POOL:
            self._queue.add(_key(manifest))
            for run in self._users(metadata["namespace"], metadata["name"]):
                self._queue.add(_key(run))
        else:
            run_key = run_of(manifest)
            if run_key is not None:
                key = Key(names.KIND_TRAINING_RUN, *run_key)
                if _is_workers(manifest) and self._is_there(manifest):
                    self._queue.add_after(key, WORKER_EVENTS_SECONDS)
                elif kind == "Pod":
                    self._queue.add_after(key, POD_EVENTS_SECONDS)
                else:
                    self._queue.add(key)
            pool = (metadata.get("labels") or {}).get(names.LABEL_POOL)
            if pool is not None:
                self._queue.add_after(Key(names.KIND_ROLLOUT_POOL, metadata["namespace"], pool), POOL_SECONDS)

    def _is_there(self, manifest: Manifest) -> bool:
        known = self._cache.get(ObjectRef.of(manifest))
        return known is not None and "deletionTimestamp" not in known["metadata"]

    def _users(self, namespace: str, pool: str) -> list[Manifest]:
        return [
            run
            for run in self._cache.of_kind(names.KIND_TRAINING_RUN)
            if run["metadata"]["namespace"] == namespace and _pool_name(run) == pool
        ]

    # --- What is done ---------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Look at one resource after the other, until cancelled. Raises NotLeadingError.

        A bug that one resource meets does not end the work on the others, whoever's they are: it is logged, counted
        (outcome `bug`), said under the resource, and met again after a growing wait.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            started = self._begun[key] = time.monotonic()
            outcome = "done"
            try:
                is_run = key.kind == names.KIND_TRAINING_RUN
                wait = await (self.reconcile_run(key) if is_run else self.reconcile_pool(key))
                self._queue.succeeded(key)
                if wait is not None:
                    self._queue.add_after(key, wait)
            except ClusterError as error:
                outcome = "failed"
                wait = self._queue.retry(key)
                log.warning("%s %s/%s: %s; again in %.1f s", *key, error, wait)
            except NotLeadingError:
                raise
            except Exception as error:  # the boundary of one resource
                outcome = "bug"
                wait = self._queue.retry(key)
                log.exception("%s %s/%s: an error of the operator; again in %.1f s", *key, wait)
                await self._say_bug(key, error)
            finally:
                del self._begun[key]
                self._queue.done(key)
                if not self._queue and not self._begun:
                    self.looked_at_all.set()
            self._metrics.reconcile_seconds.labels(key.kind, outcome).observe(time.monotonic() - started)

    async def _say_bug(self, key: Key, error: Exception) -> None:
        about = self._cache.get(key.ref)
        if about is not None:
            message = f"an error of the operator, whose log has the traceback: {type(error).__name__}: {error}"
            await self._effects.say(about, Event("Warning", names.REASON_ERROR, message[:1024]))

    async def reconcile_run(self, key: Key) -> float | None:
        """Make a run what it is to be. Seconds after which something falls due, if anything. Raises ClusterError."""
        run = self._cache.get(key.ref)
        if run is None:
            self._memory.pop((key.namespace, key.name), None)
            self._queue.forget(key)
            return None
        memory = self.memory_of((key.namespace, key.name), run["metadata"]["uid"])
        observed = await self._observation.of(run, memory)
        started = time.thread_time()
        decision = desired(self._settings, observed)
        self._metrics.decide_seconds.labels(key.kind).observe(time.thread_time() - started)
        if decision.classes is not None:
            memory.classes = decision.classes
        try:
            return await self._effects.carry_out(observed, decision, memory)
        finally:
            if rollouts.is_under_way(run) != rollouts.is_under_way(self._cache.get(key.ref) or run):
                # what this process writes itself, no event tells it
                self._queue.add_after(Key(names.KIND_ROLLOUT_POOL, key.namespace, _pool_name(run)), 0.1)

    async def reconcile_pool(self, key: Key) -> float | None:
        """Write the status of a pool. Seconds after which to look again, if it is too early. Raises ClusterError."""
        pool = self._cache.get(key.ref)
        if pool is None or "deletionTimestamp" in pool["metadata"]:
            self._queue.forget(key)
            return None
        started = time.thread_time()
        runs = self._users(key.namespace, key.name)
        objects = [
            item
            for run in runs
            for item in self._cache.of_run(key.namespace, run["metadata"]["name"])
            if (item["metadata"].get("labels") or {}).get(names.LABEL_POOL) == key.name
        ]
        status: dict[str, Any] = rollouts.pool_status(
            pool, runs, objects, self._observation.problems_of(pool), datetime.now(UTC)
        )
        self._metrics.decide_seconds.labels(key.kind).observe(time.thread_time() - started)
        return await self._effects.write_pool_status(pool, status)

    def longest_seconds(self) -> float:
        """For how long the one that takes longest has been looked at."""
        return time.monotonic() - min(self._begun.values(), default=time.monotonic())

    # --- Figures --------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Runs by phase and rollouts by outcome, from the statuses; rollouts by class, from what trainers said."""
        runs = [run.get("status") or {} for run in self._cache.of_kind(names.KIND_TRAINING_RUN)]
        phases = Counter(status.get("phase", Phase.PENDING.value) for status in runs)
        for phase in Phase:
            self._metrics.runs.labels(phase.value).set(phases[phase.value])
        for field, outcome in _OUTCOMES.items():
            self._metrics.rollouts.labels(outcome).set(sum(status.get(field, 0) for status in runs))
        for name in names.CLASSES:
            count = sum(memory.classes.get(name, 0) for memory in self._memory.values())
            self._metrics.rollouts_by_class.labels(name).set(count)


_OUTCOMES: Final = {
    "rolloutsSucceeded": "succeeded",
    "rolloutsFailed": "failed",
    "rolloutsExcluded": "excluded",
    "rolloutsRunning": "running",
    "rolloutsRetried": "retried",
}


def _key(manifest: Manifest) -> Key:
    return Key(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def _is_workers(manifest: Manifest) -> bool:
    """Whether it is a pod of workers, who serve many rollouts."""
    labels = manifest["metadata"].get("labels") or {}
    is_rollouts = labels.get(names.LABEL_COMPONENT) == names.COMPONENT_ROLLOUT
    return manifest["kind"] == "Pod" and is_rollouts and names.LABEL_ROLLOUT not in labels


def _pool_name(run: Manifest) -> str:
    spec: dict[str, Any] = run.get("spec") or {}
    return str(((spec.get("rollouts") or {}).get("poolRef") or {}).get("name"))
