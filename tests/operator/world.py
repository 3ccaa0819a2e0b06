"""A controller with a fake cluster and trainers that say what they are told to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kitestring_api import names
from kitestring_operator.cluster.cache import ObjectCache
from kitestring_operator.cluster.kinds import is_watched
from kitestring_operator.controller import Controller, Key
from kitestring_operator.effects import Effects
from kitestring_operator.events import Events
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import LostRollout, Manifest, WantedRollout
from kitestring_operator.rate import TokenBucket
from kitestring_operator.run_report import RunReport
from kitestring_operator.settings import Settings
from kitestring_operator.trainer_client import TrainerSilentError
from kitestring_operator.trainers import Poller, Trainers
from tests.operator.documents import NAMESPACE, SETTINGS
from tests.operator.fake_cluster import FakeCluster


class FakeTrainers:
    """The other side of a TrainerClient: one trainer for all runs; None: it does not answer."""

    def __init__(self) -> None:
        self.says: RunReport | None = None
        self.wants: tuple[WantedRollout, ...] = ()
        self.told_live: list[Mapping[str, Any]] = []
        self.told_lost: list[LostRollout] = []

    async def report(self, url: str, credential: str) -> RunReport:
        if self.says is None:
            raise TrainerSilentError(url)
        return self.says

    async def wanted(self, url: str, credential: str, limit: int) -> tuple[WantedRollout, ...]:
        return self.wants[:limit]

    async def lost(self, url: str, credential: str, lost: LostRollout) -> None:
        if self.says is None:
            raise TrainerSilentError(url)
        self.told_lost.append(lost)

    async def change(self, url: str, credential: str, live: Mapping[str, Any]) -> None:
        if self.says is None:
            raise TrainerSilentError(url)
        self.told_live.append(live)


class World:
    """What a test holds in its hands. Events reach the controller only by `deliver`."""

    def __init__(self, settings: Settings = SETTINGS, cluster: FakeCluster | None = None) -> None:
        self.settings = settings
        self.cluster = cluster or FakeCluster()
        self.trainers = FakeTrainers()
        self.metrics = Metrics()
        self.cache = ObjectCache()
        speaking = Trainers(self.cluster, self.trainers, self.metrics, "")  # type: ignore[arg-type]
        self.effects = Effects(
            self.cluster,
            self.cache,
            events=Events(self.cluster, "test"),
            trainers=speaking,
            jobs=TokenBucket(settings.job_creation_per_second),
            metrics=self.metrics,
        )
        self.controller = Controller(
            settings,
            self.cluster,
            self.cache,
            self.effects,
            metrics=self.metrics,
            has_kueue="Workload" in self.cluster.kinds,
        )
        self.poller = Poller(
            speaking,
            self.cache,
            memory_of=self.controller.memory_of,
            changed=self.controller.trainer_said,
            seconds=settings.poll_seconds,
        )

    def deliver(self) -> None:
        """Let the controller hear all that was told of what it watches."""
        told, self.cluster.told = self.cluster.told, []
        for event, manifest in told:
            if is_watched(manifest):
                self.controller.observe(manifest, event)  # type: ignore[arg-type]

    async def settle(self, rounds: int = 30) -> None:
        """Look at everything until nothing is written any more; pods come and go meanwhile."""
        for _ in range(rounds):
            before = len(self.cluster.writes)
            self.cluster.make_pods()
            self.deliver()
            await self.ask()
            self.forget_pace()
            for kind in (names.KIND_TRAINING_RUN, names.KIND_ROLLOUT_POOL):
                for item in list(self.cache.of_kind(kind)):
                    await self.look(item)
            self.deliver()
            if len(self.cluster.writes) == before:
                return
        raise AssertionError(f"still writing: {self.cluster.writes[-6:]}")

    async def look(self, item: Manifest) -> float | None:
        """Reconcile one resource."""
        key = Key(item["kind"], item["metadata"]["namespace"], item["metadata"]["name"])
        if key.kind == names.KIND_TRAINING_RUN:
            return await self.controller.reconcile_run(key)
        return await self.controller.reconcile_pool(key)

    async def ask(self) -> None:
        """Poll every trainer once."""
        await self.poller.ask_all()

    def with_kueue(self) -> World:
        """The same with Kueue in the cluster, and a controller that knows it."""
        self.cluster.kinds |= {"Workload", "LocalQueue"}
        return World(self.settings, self.cluster)

    def forget_pace(self) -> None:
        """As if the last status had been written long ago."""
        for run in self.cache.of_kind(names.KIND_TRAINING_RUN):
            metadata = run["metadata"]
            memory = self.controller.memory_of((metadata["namespace"], metadata["name"]), metadata["uid"])
            memory.status_written_at = None
        self.effects.resynced(())

    def status(self, name: str = "calculator") -> dict[str, Any]:
        found = self.cluster.find(names.KIND_TRAINING_RUN, name)
        assert found is not None
        status: dict[str, Any] = found.get("status") or {}
        return status

    def there(self, kind: str) -> set[str]:
        """Names of the objects of a kind."""
        return {ref.name for ref in self.cluster.objects if ref.kind == kind and ref.namespace == NAMESPACE}


def report(phase: str = "RollingOut", step: int = 1, **fields: Any) -> RunReport:
    """What a trainer says."""
    return RunReport.model_validate({"phase": phase, "step": step, "steps": 3, **fields})


@asynccontextmanager
async def working(world: World) -> AsyncIterator[None]:
    """With the controller's own loop."""
    task = asyncio.create_task(world.controller.work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
