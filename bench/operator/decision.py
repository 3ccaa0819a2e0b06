"""One run with thousands of pods: what looking at it costs when nothing has changed. No process, no HTTP."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from bench.operator import documents
from bench.operator.store import Store
from bench.operator.workloads import Workloads
from kitestring_api import names
from kitestring_operator.cluster.cache import ObjectCache
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.controller import Controller, Key
from kitestring_operator.effects import Effects
from kitestring_operator.events import Events
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Manifest, ObjectRef, WantedRollout
from kitestring_operator.rate import TokenBucket
from kitestring_operator.run_report import RunReport
from kitestring_operator.trainers import Poller, Trainers

ROUNDS = 30


class _Requests:
    """`cluster.protocol.Cluster` on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def apply(self, manifest: Manifest) -> Manifest:
        return self._store.apply(manifest)

    async def rehearse(self, manifest: Manifest) -> None: ...

    async def create(self, manifest: Manifest) -> Manifest:
        return self._store.create(manifest)

    async def update(self, manifest: Manifest) -> Manifest:
        return self._store.update(manifest)

    async def patch(
        self, ref: ObjectRef, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Manifest | None:
        return self._store.patch(ref, patch)

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> Manifest | None:
        return self._store.patch_status(ref, uid, status)

    async def delete(self, ref: ObjectRef, **_: Any) -> None:
        self._store.delete(ref)

    async def get(self, ref: ObjectRef) -> Manifest | None:
        return self._store.get(ref)

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
        return list(self._store.of_kind(kind))

    async def log_tail(self, pod: ObjectRef, container: str, *, lines: int, limit_bytes: int) -> str:
        return ""

    async def latest_event(self, namespace: str, uid: str, reason: str) -> str:
        return ""

    async def serves(self, kind: str) -> bool:
        return kind != "Workload"


class _Trainer:
    """A trainer that runs, and whose rollouts wait for Jobs of their own."""

    def __init__(self, wants: int) -> None:
        self._wants = wants

    async def report(self, url: str, credential: str) -> RunReport:
        return RunReport.model_validate({"phase": "RollingOut", "step": 3, "steps": 1000, "tokens": 12345})

    async def wanted(self, url: str, credential: str, limit: int) -> tuple[WantedRollout, ...]:
        made = min(limit, self._wants)
        return tuple(WantedRollout(f"t000001-{n // 8:08d}-{n % 8:03d}", 1, f"credential-{n}") for n in range(made))

    async def lost(self, *_: object) -> None: ...

    async def change(self, *_: object) -> None: ...


class _World:
    """A controller on a store, with one run that has settled."""

    def __init__(self, isolation: Literal["Worker", "Job"], pods: int) -> None:
        self.store = Store()
        Workloads(self.store)
        cluster, metrics, cache = _Requests(self.store), Metrics(), ObjectCache()
        trainer = _Trainer(pods if isolation == "Job" else 0)
        settings = documents.settings(resync_seconds=3600)
        trainers = Trainers(cluster, trainer, metrics, "")  # type: ignore[arg-type]
        effects = Effects(
            cluster,
            cache,
            events=Events(cluster, "bench"),
            trainers=trainers,
            jobs=TokenBucket(1e9),
            metrics=metrics,
        )
        self.controller = Controller(settings, cluster, cache, effects, metrics=metrics, has_kueue=False)
        self.store.listeners.append(lambda event, manifest: self.controller.observe(manifest, event))
        self._poller = Poller(
            trainers, cache, memory_of=self.controller.memory_of, changed=self.controller.trainer_said, seconds=3600
        )
        self.store.put(documents.storage_keys())
        self.store.put(documents.pool("pool", pods, isolation))
        self.store.put(documents.run("run", "pool"))

    async def settle(self) -> None:
        """Until nothing is written. Waits for the pace at which statuses are written."""
        await self.controller.resync()
        quiet = 0
        while quiet < 2:
            before = len(self.store.writes)
            await self._poller.ask_all()
            await self.look_at_run()
            await self.look_at_pool()
            quiet = quiet + 1 if len(self.store.writes) == before else 0
            if not quiet:
                await asyncio.sleep(1.1)  # statuses are written once a second

    async def look_at_run(self) -> object:
        return await self.controller.reconcile_run(Key(names.KIND_TRAINING_RUN, documents.NAMESPACE, "run"))

    async def look_at_pool(self) -> object:
        return await self.controller.reconcile_pool(Key(names.KIND_ROLLOUT_POOL, documents.NAMESPACE, "pool"))

    def rollout_pods(self) -> int:
        return sum(
            pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_ROLLOUT
            for pod in self.store.of_kind("Pod")
        )

    def phase(self) -> object:
        run = self.store.get(KINDS[names.KIND_TRAINING_RUN].ref(documents.NAMESPACE, "run"))
        return (run or {}).get("status", {}).get("phase")


async def _milliseconds(look: Callable[[], Awaitable[object]]) -> float:
    taken = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        await look()
        taken.append(time.process_time() - begun)
    return 1000 * statistics.median(taken)


async def measure(pods: int) -> dict[str, float]:
    """Median CPU milliseconds of one look at a run with so many rollout pods, and at its pool; writes of all looks."""
    found: dict[str, float] = {}
    writes = 0
    for isolation, what in (("Worker", "workers"), ("Job", "Jobs of single rollouts")):
        world = _World(isolation, pods)  # type: ignore[arg-type]
        await world.settle()
        if world.rollout_pods() != pods or world.phase() != "Running":
            raise RuntimeError(f"{world.rollout_pods()} of {pods} pods; the run is {world.phase()}")
        before = len(world.store.writes)
        found[f"reconcile of a run, {what}"] = await _milliseconds(world.look_at_run)
        found[f"reconcile of its pool, {what}"] = await _milliseconds(world.look_at_pool)
        writes += len(world.store.writes) - before
    return found | {"writes when nothing changed, one run": writes}
