"""A trainer's Job that something else suspends, as Kueue does where a LocalQueue is named `default`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.documents import pool, run, storage_secret
from tests.operator.world import World, report

JOB = "calculator-trainer-1"
BY_KUEUE = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "default"}}}


@pytest.fixture
async def world() -> World:
    made = World()
    made.cluster.put(storage_secret())
    made.cluster.put(pool())
    made.cluster.put(run())
    await made.settle()
    return made


async def suspend(world: World, *, suspended: bool = True, **more: Any) -> None:
    world.cluster.change("Job", JOB, {"spec": {"suspend": suspended}} | more)
    await world.settle()


def ready(world: World) -> tuple[str, str, str]:
    found = next(entry for entry in world.status()["conditions"] if entry["type"] == "TrainerReady")
    return found["status"], found["reason"], found["message"]


async def test_it_is_said_with_the_queue_and_the_remedy(world: World) -> None:
    await suspend(world, **BY_KUEUE)
    status = world.status()
    assert (status["phase"], status["reason"]) == ("Starting", "SuspendedByOthers")
    assert (
        f"Job {JOB} of the trainer is suspended, and not by this operator: Kueue has put it into queue default"
        in (status["message"])
    )
    assert "give that queue another name" in status["message"]
    assert ready(world) == ("False", "SuspendedByOthers", status["message"])
    events = [item for item in world.cluster.of_kind("Event") if item["reason"] == "SuspendedByOthers"]
    assert [event["type"] for event in events] == ["Warning"]


async def test_without_a_queue_other_causes_are_named(world: World) -> None:
    await suspend(world)
    assert "find what suspends Jobs here" in world.status()["message"]


async def test_admitted_it_starts_as_any_other(world: World) -> None:
    await suspend(world, **BY_KUEUE)
    await suspend(world, suspended=False)
    assert (world.status()["phase"], world.status()["reason"]) == ("Starting", "Starting")
    world.trainers.says = report()
    await world.settle()
    assert world.status()["phase"] == "Running"


async def test_a_run_whose_trainer_is_taken_away_so_is_not_running(world: World) -> None:
    world.trainers.says = report()
    await world.settle()
    await suspend(world, **BY_KUEUE)
    assert (world.status()["phase"], world.status()["reason"]) == ("Restarting", "SuspendedByOthers")
    assert world.status()["restarts"] == 0


async def test_suspended_and_resumed_the_run_has_a_new_job(world: World) -> None:
    """The remedy, once the queue has another name."""
    await suspend(world, **BY_KUEUE)
    old = world.cluster.find("Job", JOB)
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": False}})
    await world.settle()
    (new,) = world.cluster.of_kind("Job")
    assert old is not None and new["metadata"]["uid"] != old["metadata"]["uid"]
    assert "suspend" not in new["spec"]
