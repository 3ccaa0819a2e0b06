"""The loop itself: what is heard is looked at, failures are tried again, and floods of pods are gathered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator import controller as module
from kitestring_operator.cluster.errors import NotLeadingError, UnavailableError
from kitestring_operator.cluster.kinds import KINDS, RESOURCES
from kitestring_operator.desired import desired
from kitestring_operator.events import Events
from kitestring_operator.observed import Desired, Event, Manifest, ObjectRef, Observed
from kitestring_operator.run_report import RunReport
from kitestring_operator.settings import Settings
from tests.operator.documents import NAMESPACE, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.world import World, report, working


def filled(world: World) -> World:
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run())
    return world


async def test_a_run_that_is_heard_of_is_started() -> None:
    world = filled(World())
    async with working(world):
        world.deliver()
        await world.cluster.until(lambda: "phase" in world.status())
    assert world.status()["phase"] == "Starting"


async def test_a_cluster_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitestring_operator.work_queue.FIRST_WAIT_SECONDS", 0.01)

    class Away(FakeCluster):
        fails = 3

        async def apply(self, manifest: Manifest) -> Manifest:
            if self.fails:
                self.fails -= 1
                raise UnavailableError("apply", 503, "later")
            return await super().apply(manifest)

    world = filled(World(cluster=Away()))
    async with working(world):
        world.deliver()
        await world.cluster.until(lambda: world.there("Job"))
    failed = {"kind": "TrainingRun", "outcome": "failed"}
    counted = world.metrics.registry.get_sample_value("kitestring_operator_reconcile_seconds_count", failed)
    assert counted


async def test_it_says_when_all_that_was_there_was_looked_at() -> None:
    """kopf, whose own list takes the same time, waits for it."""
    empty = World()
    await empty.controller.resync()
    assert empty.controller.looked_at_all.is_set()
    world = filled(World())
    await world.controller.resync()
    assert not world.controller.looked_at_all.is_set()
    async with working(world), asyncio.timeout(20):
        await world.controller.looked_at_all.wait()
    assert "phase" in world.status()


async def test_what_went_before_the_watches_began_is_found_by_the_second_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf's own first list tells of what is there, not of what has gone since ours."""
    monkeypatch.setattr(module, "SECOND_LIST_SECONDS", 0.01)
    world = filled(World())
    await world.settle()
    (job,) = (ref for ref in world.cluster.objects if ref.kind == "Job")
    del world.cluster.objects[job]
    world.cluster.told.clear()
    syncing = asyncio.create_task(world.controller.keep_in_sync())
    async with asyncio.timeout(20):
        while world.cache.get(job) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # a list has no event
    syncing.cancel()


async def test_a_list_that_fails_leaves_what_is_known() -> None:
    class Away(FakeCluster):
        is_away = False

        async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
            if self.is_away and kind == "Job":
                raise UnavailableError("list", 503, "later")
            return await super().list(kind, namespace, selector)

    cluster = Away()
    world = filled(World(cluster=cluster))
    await world.settle()
    assert world.cache.of_kind("Job")
    cluster.is_away = True
    with pytest.raises(UnavailableError):
        await world.controller.resync()
    assert world.cache.of_kind("Job")


async def test_without_the_lease_the_loop_ends() -> None:
    class Fenced(FakeCluster):
        async def create(self, manifest: Manifest) -> Manifest:
            raise NotLeadingError("create")

    world = filled(World(cluster=Fenced()))
    world.deliver()
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20):
            await world.controller.work()
    assert caught.group_contains(NotLeadingError)


async def test_a_bug_that_one_run_meets_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings, observed: Observed) -> Desired:
        if observed.name == "cursed":
            raise KeyError("a bug")
        return desired(settings, observed)

    monkeypatch.setattr(module, "desired", broken)
    world = World()
    world.cluster.put(storage_secret())
    world.cluster.put(pool())
    world.cluster.put(run("cursed"))
    world.cluster.put(run())
    async with working(world):
        world.deliver()
        await world.cluster.until(lambda: "phase" in world.status())
    (said,) = [event for event in world.cluster.of_kind("Event") if event["involvedObject"]["name"] == "cursed"]
    assert said["type"] == "Warning" and "KeyError: 'a bug'" in said["message"]
    counted = {"kind": "TrainingRun", "outcome": "bug"}
    assert world.metrics.registry.get_sample_value("kitestring_operator_reconcile_seconds_count", counted)


async def test_a_bug_that_one_trainer_meets_does_not_keep_the_others_from_being_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = filled(World())
    world.cluster.put(run("cursed"))
    await world.settle()
    asked = world.trainers.report

    async def broken(url: str, credential: str) -> RunReport:
        if "cursed" in url:
            raise KeyError("a bug")
        return await asked(url, credential)

    monkeypatch.setattr(world.trainers, "report", broken)
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"
    assert "KeyError: 'a bug'" in caplog.text and "team-a/cursed" in caplog.text
    assert world.metrics.registry.get_sample_value("kitestring_operator_trainer_polls_total", {"outcome": "bug"})


async def test_a_flood_of_pods_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER_EVENTS_SECONDS", 0.05)
    world = filled(World())
    await world.settle()
    world.trainers.says = report()
    await world.settle()
    deployment = world.cluster.find("Deployment", "calculator-rollout")
    assert deployment is not None
    world.forget_pace()
    before = len(world.cluster.writes)
    async with working(world):
        for number in range(1000):
            world.cluster._put_pod(deployment, f"calculator-rollout-x{number}")
        world.deliver()
        await world.cluster.until(lambda: len(world.cluster.writes) > before)
    looked = world.metrics.registry.get_sample_value(
        "kitestring_operator_reconcile_seconds_count", {"kind": "TrainingRun", "outcome": "done"}
    )
    assert 1 <= (looked or 0) <= 22, "they are gathered for 0.05 s"
    assert [ref.kind for _, ref in world.cluster.writes[before:]] == ["RolloutPool"]


async def test_statuses_are_written_at_most_once_a_second() -> None:
    world = filled(World())
    await world.settle()
    world.trainers.says = report(step=1)
    await world.settle()
    statuses = [entry for entry in world.cluster.writes if entry[0] == "status" and entry[1].kind == "TrainingRun"]
    for tokens in range(50):
        world.trainers.says = report(step=1, tokens=tokens)
        await world.ask()
        for item in list(world.cache.of_kind("TrainingRun")):
            wait = await world.look(item)
    after = [entry for entry in world.cluster.writes if entry[0] == "status" and entry[1].kind == "TrainingRun"]
    assert len(after) - len(statuses) <= 1
    assert wait is not None and wait > 0, "the rest is written later"


async def test_the_same_is_said_once_and_counted_later() -> None:
    cluster = FakeCluster()
    about = cluster.put(run())
    seconds = 0.0

    def now() -> Any:
        from datetime import UTC, datetime, timedelta

        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)

    events = Events(cluster, "test", now)
    for _ in range(3):
        await events.say(about, Event("Warning", "TrainerLost", "gone"))
    assert len(cluster.of_kind("Event")) == 1 and len(cluster.writes) == 1
    seconds = 61.0
    await events.say(about, Event("Warning", "TrainerLost", "gone"))
    (said,) = cluster.of_kind("Event")
    assert (said["count"], said["firstTimestamp"][:10], said["involvedObject"]["uid"]) == (
        2,
        "2026-01-01",
        about["metadata"]["uid"],
    )
    await events.say(about, Event("Warning", "TrainerLost", "gone again"))
    assert len(cluster.of_kind("Event")) == 2


async def test_an_event_that_cannot_be_said_does_no_harm() -> None:
    class Refusing(FakeCluster):
        async def apply(self, manifest: Manifest) -> Manifest:
            raise UnavailableError("apply", 503, "no")

    cluster = Refusing()
    await Events(cluster, "test").say(cluster.put(run()), Event("Normal", "Running", "x"))


async def test_nothing_is_kept_of_what_is_gone() -> None:
    world = filled(World())
    await world.settle()
    for _ in range(3):
        world.cluster.remove(KINDS["TrainingRun"].ref(NAMESPACE, "calculator"))
        world.cluster.remove(KINDS["RolloutPool"].ref(NAMESPACE, "calc"))
        world.cluster.put(pool())
        world.cluster.put(run())
        await world.settle()
    item = next(iter(world.cache.of_kind("RolloutPool")))
    await world.effects.write_pool_status(item, {"replicas": 9})
    await world.controller.resync()
    living = {item["metadata"]["uid"] for kind in RESOURCES for item in world.cluster.of_kind(kind)}
    observation = world.controller._observation
    assert observation._readings.keys() | observation._pools.keys() == living
    assert world.effects._pools_written.keys() <= living


async def test_a_pool_is_fixed_as_soon_as_a_run_has_started_with_it() -> None:
    """The status of the run is the controller's own doing, of which no event tells it."""
    world = filled(World())
    value = world.metrics.registry.get_sample_value
    async with working(world), asyncio.timeout(20):
        world.deliver()
        await world.cluster.until(lambda: world.there("Job"))
        looked = {"kind": "RolloutPool", "outcome": "done"}
        while (value("kitestring_operator_reconcile_seconds_count", looked) or 0) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # a look that changes nothing has no event
        assert pool_users(world) == [], "looked at for itself and for the run, which has not started"
        world.forget_pace()
        world.cluster.change("Job", "calculator-trainer-1", {"status": {"active": 1, "ready": 0}})
        world.deliver()
        await world.cluster.until(lambda: pool_users(world) == ["calculator"])


def pool_users(world: World) -> list[str] | None:
    found = world.cluster.find("RolloutPool", "calc")
    assert found is not None
    users: list[str] | None = (found.get("status") or {}).get("users")
    return users


async def test_figures_count_runs_and_rollouts() -> None:
    world = filled(World())
    await world.settle()
    classes = {"Succeeded": 7, "AgentFailed": 5, "TimedOut": 1, "Infrastructure": 3, "InvalidTask": 2}
    assert classes.keys() == set(names.CLASSES)
    world.trainers.says = report(rollouts={"running": 2, "excluded": 11, "classes": classes | {"OfTomorrow": 1}})
    await world.settle()
    await world.controller.resync()
    value = world.metrics.registry.get_sample_value
    assert by_class(world) == classes
    assert value("kitestring_operator_runs", {"phase": "Running"}) == 1
    assert value("kitestring_operator_runs", {"phase": "Failed"}) == 0
    assert value("kitestring_operator_rollouts", {"outcome": "succeeded"}) == 7
    assert value("kitestring_operator_rollouts", {"outcome": "failed"}) == 6
    assert value("kitestring_operator_rollouts", {"outcome": "excluded"}) == 11
    page = world.metrics.exposition().decode()
    assert "kitestring_operator_is_leader" in page
    assert 'kitestring_operator_rollouts_by_class{class="InvalidTask"} 2.0' in page


async def test_rollouts_by_class_outlive_the_trainer_but_not_the_run() -> None:
    world = filled(World())
    await world.settle()
    world.trainers.says = report(rollouts={"classes": {"Succeeded": 4}})
    await world.settle()
    world.trainers.says = report("Starting", 0)  # the next one, which is being restored
    await world.settle()
    await world.controller.resync()
    assert by_class(world) == dict.fromkeys(names.CLASSES, 0) | {"Succeeded": 4}
    left = {"reason": "Completed", "step": 3, "rollouts": {"classes": {"Succeeded": 8, "TimedOut": 1}}}
    world.cluster.end_job("calculator-trainer-1", message=json.dumps(left))
    await world.settle()
    another = World(cluster=world.cluster)
    for each in (world, another):
        await each.controller.resync()
        await each.settle()
        await each.controller.resync()
        assert by_class(each) == dict.fromkeys(names.CLASSES, 0) | {"Succeeded": 8, "TimedOut": 1}
    world.cluster.remove(KINDS["TrainingRun"].ref(NAMESPACE, "calculator"))
    another.deliver()
    await another.controller.reconcile_run(module.Key("TrainingRun", NAMESPACE, "calculator"))
    await another.controller.resync()
    assert by_class(another) == dict.fromkeys(names.CLASSES, 0)


def by_class(world: World) -> dict[str, float | None]:
    value = world.metrics.registry.get_sample_value
    return {name: value("kitestring_operator_rollouts_by_class", {"class": name}) for name in names.CLASSES}


async def test_a_key_that_is_added_to_the_keys_of_runs_comes_into_old_secrets() -> None:
    """An operator that is newer than the run adds what the Secret lacks, and changes nothing in it."""
    world = filled(World())
    await world.settle()
    ref = ObjectRef("v1", "Secret", "team-a", "calculator-keys")
    old: Mapping[str, str] = dict(world.cluster.objects[ref]["data"])
    world.cluster.change(
        "Secret", "calculator-keys", {"data": {"queueCredential": None}, "metadata": {"annotations": None}}
    )
    await world.controller.resync()
    await world.settle()
    new = world.cluster.objects[ref]["data"]
    assert new.keys() == old.keys()
    assert new["queueCredential"] != old["queueCredential"] and new["tokenKey"] == old["tokenKey"]
