"""Two hundred runs and two thousand rollout pods, and what happens to them while an operator looks on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from aiohttp import web

from bench.operator import documents
from bench.operator.api_server import ApiServer, served
from bench.operator.store import Store, Write
from bench.operator.subject import Subject, operator
from bench.operator.trainers import Trainers
from bench.operator.workloads import Workloads, status
from kitestring_api import names
from kitestring_operator.cluster.kinds import RESOURCES
from kitestring_operator.observed import Manifest

RUNS = 200
LARGE_POOL = 1_005
"""Workers of one run; the other 199 have five each: 2,000 rollout pods."""
SMALL_POOL = 5
EVENTS = 10_000
SECONDS = 30.0
RESYNCS = 3
"""Times that everything is listed and looked at while nothing changes."""
QUIET_RESYNC_SECONDS = 8.0


class Scene:
    """The cluster with its trainers."""

    def __init__(self) -> None:
        self.store = Store()
        self.trainers = Trainers()
        self._workloads = Workloads(self.store)
        self.server = ApiServer(self.store)
        self._random = random.Random(0)
        self.store.put(documents.storage_keys())
        self.store.put(documents.pool("large", LARGE_POOL))
        self.store.put(documents.pool("small", SMALL_POOL))
        for number in range(RUNS):
            self.store.put(documents.run(f"run-{number:03d}", "small" if number else "large"))

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """The URL of its API server, and of its trainers."""
        app = web.Application(client_max_size=2**24)
        app.add_routes([*self.trainers.routes(), *self.server.routes()])
        async with served(app) as url:
            try:
                yield url
            finally:
                self.server.stop()

    # --- What is there --------------------------------------------------------------------------------------------

    def rollout_pods(self) -> list[Manifest]:
        return [pod for pod in self.store.of_kind("Pod") if _component(pod) == names.COMPONENT_ROLLOUT]

    def phases(self) -> Counter[str]:
        """Runs by phase."""
        return Counter(
            (run.get("status") or {}).get("phase", "") for run in self.store.of_kind(names.KIND_TRAINING_RUN)
        )

    def pools_are_right(self) -> bool:
        """Whether the status of each pool counts the pods that are ready."""
        ready = Counter(pod["metadata"]["labels"][names.LABEL_POOL] for pod in self.rollout_pods() if _is_ready(pod))
        return all(
            (pool.get("status") or {}).get("readyReplicas") == ready[pool["metadata"]["name"]]
            for pool in self.store.of_kind(names.KIND_ROLLOUT_POOL)
        )

    # --- What happens ---------------------------------------------------------------------------------------------

    async def flood(self) -> None:
        """EVENTS changes of rollout pods, evenly over SECONDS: each turns ready or not ready, some restart."""
        pods = [pod["metadata"]["name"] for pod in self.rollout_pods()]
        refs = {pod["metadata"]["name"]: pod for pod in self.rollout_pods()}
        begun, done = time.monotonic(), 0
        while done < EVENTS:
            due = min(EVENTS, int((time.monotonic() - begun) / SECONDS * EVENTS) + 1)
            for _ in range(due - done):
                name = self._random.choice(pods)
                pod = refs[name]
                restarts = pod["status"]["containerStatuses"][0]["restartCount"] + (self._random.random() < 0.1)
                changed = pod | {"status": status(pod, is_ready=not _is_ready(pod), restarts=restarts)}
                refs[name] = self.store.show("MODIFIED", changed)
            done = due
            await asyncio.sleep(0.02)


def _component(item: Manifest) -> str | None:
    return (item["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT)


def _is_ready(pod: Manifest) -> bool:
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in pod["status"]["conditions"])


def _writes(writes: Iterable[Write]) -> list[Write]:
    """Without those of the operator's own Lease, which it renews while it lives."""
    return [write for write in writes if write.ref.kind != "Lease"]


async def _brought_up(scene: Scene, folder: Path, url: str) -> dict[str, float]:
    """From 200 runs that were applied to 200 that run."""
    async with operator(folder, documents.settings(resync_seconds=60.0), url) as subject:
        await subject.until(lambda: scene.phases()["Running"] == RUNS, "200 runs to run", 400)
        wall, cpu = time.monotonic() - subject.begun, subject.cpu_seconds()
        await subject.until(scene.pools_are_right, "the pools' statuses", 60)
        await _settled(subject, scene)
    return {"200 runs brought up, CPU": cpu, "200 runs brought up": wall}


async def _settled(subject: Subject, scene: Scene) -> None:
    """Until nothing was written for six seconds: counters are written every five."""

    def quiet() -> bool:
        last = _writes(scene.store.writes)
        return not last or time.monotonic() - last[-1].at > 6.0

    await subject.until(quiet, "the operator to write no more", 120, pause=0.5)


async def _unchanged(scene: Scene, folder: Path, url: str) -> dict[str, float]:
    """An operator that starts where all is as it is to be."""
    before = len(scene.store.writes)
    async with operator(folder, documents.settings(resync_seconds=QUIET_RESYNC_SECONDS), url) as subject:
        ready = await subject.until_ready(60)
        level = await _all_looked_at(subject, 1)
        await _kopf_watches(subject, scene)
        cpu = subject.cpu_seconds()
        await _all_looked_at(subject, 1 + RESYNCS)
    written = _writes(scene.store.writes[before:])
    return {
        "started again, ready": ready,
        "started again, every run looked at": level,
        "started again, CPU": cpu,
        "writes when nothing changed, 200 runs": len(written),
    }


async def _all_looked_at(subject: Subject, times: int) -> float:
    """Seconds from its start until every run was looked at so often."""

    async def done() -> bool:
        return await subject.looked_at(names.KIND_TRAINING_RUN) >= times * RUNS

    await subject.until(done, f"{times} times {RUNS} reconciliations", 120, pause=0.1)
    return time.monotonic() - subject.begun


async def _kopf_watches(subject: Subject, scene: Scene) -> int:
    """Until kopf has listed all pods by itself; how many it heard of."""
    pods = len(list(scene.store.of_kind("Pod")))

    async def watches() -> bool:
        return scene.server.is_watched("Pod") and await _heard(subject) >= pods

    await subject.until(watches, "kopf's own first list of all pods", 60)
    return pods


async def _heard(subject: Subject) -> int:
    """Events of pods so far."""
    return int(await subject.metric("kitestring_operator_watch_events_total", kind="Pod"))


async def _flooded(scene: Scene, folder: Path, url: str) -> dict[str, float]:
    """Events by the thousand, while every trainer says something new at each question."""
    async with operator(folder, documents.settings(resync_seconds=60.0), url) as subject:
        await subject.until_ready(60)
        await _all_looked_at(subject, 1)
        pods = await _kopf_watches(subject, scene)
        scene.trainers.moves = True
        first, cpu, begun = len(scene.store.writes), subject.cpu_seconds(), time.monotonic()
        await scene.flood()
        ended, scene.trainers.moves = time.monotonic(), False

        async def all_heard() -> bool:
            return await _heard(subject) >= pods + EVENTS

        await subject.until(all_heard, f"{EVENTS} events to be heard", 600)
        late, spent = time.monotonic() - ended, subject.cpu_seconds() - cpu
        written = _writes(scene.store.writes[first:])
        took = time.monotonic() - begun
        await subject.until(scene.pools_are_right, "the pools' statuses", 60)
        right = time.monotonic() - ended
        statuses = Counter(write.ref for write in written if write.verb == "status")
        most = {kind: max(count for ref, count in statuses.items() if ref.kind == kind) / took for kind in RESOURCES}
        return {
            "10,000 events in 30 s, CPU": spent,
            "last event heard after": late,
            "pools right after the last event": right,
            "status writes of one run a second, at most": most[names.KIND_TRAINING_RUN],
            "status writes of one pool a second, at most": most[names.KIND_ROLLOUT_POOL],
            "other writes": len(written) - statuses.total(),
            "memory, peak": subject.peak_mb(),
        }


async def measure(folder: Path) -> dict[str, float]:
    """All of it, one operator process after the other."""
    scene = Scene()
    async with scene.served() as url:
        found = await _brought_up(scene, folder, url)
        found |= await _unchanged(scene, folder, url)
        return found | await _flooded(scene, folder, url)
