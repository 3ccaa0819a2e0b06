"""The lease: one acts; who loses it stops at once, and knows so without asking."""

from __future__ import annotations

import asyncio

import pytest

from kitestring_operator.cluster.errors import UnavailableError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.leader import Leader, LeaseLostError
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Manifest, ObjectRef
from kitestring_operator.settings import LeaderElection
from tests.operator.fake_cluster import FakeCluster

REF = KINDS["Lease"].ref("ops", "op")
ELECTION = LeaderElection(lease_name="op", lease_seconds=15, renew_seconds=0.001)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def leader(cluster: FakeCluster, identity: str, clock: Clock) -> Leader:
    return Leader(cluster, ELECTION, namespace="ops", identity=identity, metrics=Metrics(), clock=clock)


async def turns(cluster: FakeCluster, number: int = 5) -> None:
    """Let the leaders ask so many times more."""
    wanted = cluster.reads + number
    await cluster.until(lambda: cluster.reads >= wanted)


async def until_lost(one: Leader) -> None:
    await asyncio.wait_for(one.keep(), 5)


async def test_the_first_gets_it_and_the_second_waits() -> None:
    cluster, clock = FakeCluster(), Clock()
    first, second = leader(cluster, "a", clock), leader(cluster, "b", clock)
    await first.acquire()
    assert first.may_act() and first.transitions == 0
    waiting = asyncio.create_task(second.acquire())
    await turns(cluster)
    assert not waiting.done() and not second.may_act()
    await first.release()
    assert not first.may_act()
    await asyncio.wait_for(waiting, 5)
    assert second.may_act() and second.transitions == 1


async def test_a_silent_holder_is_followed_after_the_whole_time_by_ones_own_clock() -> None:
    cluster, clock = FakeCluster(), Clock()
    first, second = leader(cluster, "a", clock), leader(cluster, "b", clock)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await turns(cluster)
    clock.now += 14
    await turns(cluster)
    assert not waiting.done(), "not before its time is over"
    assert not first.may_act(), "it stops by itself before another may begin"
    clock.now += 2
    await asyncio.wait_for(waiting, 5)
    assert second.may_act() and second.transitions == 1
    with pytest.raises(LeaseLostError):
        await until_lost(first)


async def test_a_holder_that_cannot_renew_goes_on_until_its_time_and_no_longer() -> None:
    clock = Clock()

    class Away(FakeCluster):
        is_away = False

        async def get(self, ref: ObjectRef) -> Manifest | None:
            found = await super().get(ref)
            if self.is_away:
                raise UnavailableError("get", 0, "no answer")
            return found

    cluster = Away()
    one = leader(cluster, "a", clock)
    await one.acquire()
    cluster.is_away = True
    keeping = asyncio.create_task(one.keep())
    clock.now += 5
    await turns(cluster)
    assert one.may_act() and not keeping.done()
    clock.now += 10
    assert not one.may_act()
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(keeping, 5)


async def test_renewing_keeps_it() -> None:
    cluster, clock = FakeCluster(), Clock()
    one = leader(cluster, "a", clock)
    await one.acquire()
    keeping = asyncio.create_task(one.keep())
    for _ in range(5):
        clock.now += 10
        await turns(cluster)
        assert one.may_act()
    keeping.cancel()
    assert cluster.objects[REF]["spec"]["leaseTransitions"] == 0


async def test_of_two_that_try_at_once_one_gets_it() -> None:
    for _ in range(5):
        cluster, clock = FakeCluster(), Clock()
        cluster.put(
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": "op", "namespace": "ops"},
                "spec": {"holderIdentity": "", "leaseTransitions": 7},
            }
        )
        ones = [leader(cluster, name, clock) for name in "abc"]
        tasks = [asyncio.create_task(one.acquire()) for one in ones]
        await turns(cluster)
        assert [one.may_act() for one in ones].count(True) == 1
        assert [one.transitions for one in ones if one.may_act()] == [8]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
