"""When the process is red: what it says for each cause, and that it says nothing while it is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kitestring_operator import main
from kitestring_operator.cluster.errors import UnavailableError
from kitestring_operator.observed import Manifest, ObjectRef
from kitestring_operator.settings import LeaderElection, Settings
from tests.operator.documents import SETTINGS, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.world import World, working

ELECTION = LeaderElection(namespace="ops", renew_seconds=0.001)
ALONE = SETTINGS.model_copy(update={"leader_election": LeaderElection(enabled=False), "resync_seconds": 100.0})
STANDBY = ALONE.model_copy(update={"leader_election": ELECTION})


class Client:
    """A connection over which nothing is asked."""

    def close(self) -> None:
        """As that of the cluster's client."""


@pytest.fixture
async def stack(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncExitStack]:
    monkeypatch.setattr(main, "connect", Client)
    async with AsyncExitStack() as found:
        yield found


def process(stack: AsyncExitStack, settings: Settings, world: World | None = None) -> main._Operator:
    """A process that acts in this world; without one it has not begun to act."""
    made = main._Operator(settings, stack)
    made._controller = None if world is None else world.controller
    return made


async def test_one_that_waits_is_alive_and_ready(stack: AsyncExitStack) -> None:
    for settings in (ALONE, STANDBY):
        waits = process(stack, settings)
        assert waits._problem() is None
        assert waits._unready() is None


@pytest.mark.parametrize(("resync_seconds", "silence"), [(10.0, 180), (100.0, 500)])
async def test_silence_of_the_cluster_is_a_problem(stack: AsyncExitStack, resync_seconds: float, silence: int) -> None:
    """Watches that hang look like a cluster in which nothing happens; a resync, which fails or hangs too, does not."""
    world = World()
    acts = process(stack, ALONE.model_copy(update={"resync_seconds": resync_seconds}), world)
    assert acts._problem() is None
    world.controller.heard_at = time.monotonic() - silence + 10
    assert acts._problem() is None
    world.controller.heard_at = time.monotonic() - silence - 1
    assert acts._problem() == f"nothing was heard of the cluster for {silence} s"
    world.controller.observe(world.cluster.put(run()), "ADDED")
    assert acts._problem() is None, "an event is a word"
    world.controller.heard_at = time.monotonic() - silence - 1
    await world.controller.resync()
    assert acts._problem() is None, "and so is a list"


async def test_a_resource_that_is_looked_at_for_ever_is_a_problem(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    class Hanging(FakeCluster):
        async def get(self, ref: ObjectRef) -> Manifest | None:
            found = await super().get(ref)
            await answers.wait()
            return found

    world = World(cluster=Hanging())
    for document in (storage_secret(), pool(), run()):
        world.cluster.put(document)
    acts = process(stack, ALONE, world)
    async with working(world), asyncio.timeout(20):
        world.deliver()
        await world.cluster.until(lambda: world.cluster.reads)
        assert acts._problem() is None, "it may take a while"
        monkeypatch.setattr(main, "STUCK_SECONDS", 0.0)
        assert str(acts._problem()).startswith("a resource is being looked at for ")
        answers.set()
        await world.controller.looked_at_all.wait()
        assert acts._problem() is None


async def test_one_that_acts_is_ready_once_it_has_seen_everything(stack: AsyncExitStack) -> None:
    class Away(FakeCluster):
        is_away = True

        async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
            if self.is_away and kind == "Pod":
                raise UnavailableError("list", 503, "later")
            return await super().list(kind, namespace, selector)

    cluster = Away()
    world = World(cluster=cluster)
    acts = process(stack, STANDBY, world)
    assert acts._unready() == "the first list of all objects is not there yet"
    with pytest.raises(UnavailableError):
        await world.controller.resync()
    assert acts._unready() == "the first list of all objects is not there yet"
    cluster.is_away = False
    await world.controller.resync()
    assert acts._unready() is None


async def test_one_that_waits_and_does_not_hear_of_the_lease_is_not_ready(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not take over. To start it again would not help: it stays alive."""

    class Deaf(FakeCluster):
        is_deaf = True

        async def get(self, ref: ObjectRef) -> Manifest | None:
            found = await super().get(ref)
            if self.is_deaf:
                raise UnavailableError("get", 0, "no answer")
            return found

    cluster = Deaf()
    waits = process(stack, STANDBY)
    leader = waits._leader
    assert leader is not None
    monkeypatch.setattr(leader, "_cluster", cluster)
    leader.heard_at = time.monotonic() - main.SHORTEST_SILENCE_SECONDS - 1
    acquiring = asyncio.create_task(leader.acquire())
    await cluster.until(lambda: cluster.reads >= 3)
    assert waits._unready() == "the API server does not answer"
    assert waits._problem() is None
    cluster.is_deaf = False
    async with asyncio.timeout(20):
        await acquiring
    assert waits._unready() is None
