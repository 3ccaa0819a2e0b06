"""Isolation Job: Jobs are made for what the queue asks, no more than may be at once, and go when they have ended."""

from __future__ import annotations

import copy

import pytest

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.cluster.errors import ClusterError, ForbiddenError, RefusedError, UnavailableError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.observed import LostRollout, Manifest, WantedRollout
from kitestring_operator.trainer_client import TrainerSilentError
from tests.operator.documents import NAMESPACE, SETTINGS, pool, run, storage_secret
from tests.operator.fake_cluster import FakeCluster
from tests.operator.world import World, report


def wanted(*rollouts: str, number: int = 1, image: str | None = None) -> tuple[WantedRollout, ...]:
    return tuple(WantedRollout(name, number, f"credential of {name}", image) for name in rollouts)


def job_name(rollout: str, number: int = 1) -> str:
    return identity.rollout_job_name("calculator", rollout, number)


class Choosy(FakeCluster):
    """A cluster that refuses Jobs whose agent has an image in `no`, with the error."""

    def __init__(self) -> None:
        super().__init__()
        self.no: dict[str, ClusterError] = {}

    def _check(self, manifest: Manifest) -> None:
        if manifest["kind"] == "Job":
            image = manifest["spec"]["template"]["spec"]["containers"][0]["image"]
            if image in self.no:
                raise self.no[image]

    async def apply(self, manifest: Manifest) -> Manifest:
        self._check(manifest)
        return await super().apply(manifest)

    async def rehearse(self, manifest: Manifest) -> None:
        self._check(manifest)
        await super().rehearse(manifest)


async def world_of(replicas: int = 2, per_second: float = 1000.0, cluster: FakeCluster | None = None) -> World:
    world = World(SETTINGS.model_copy(update={"job_creation_per_second": per_second}), cluster)
    world.cluster.put(storage_secret())
    world.cluster.put(pool(isolation="Job", replicas=replicas, allowedImages=["agents/*"]))
    world.cluster.put(run())
    await world.settle()
    world.trainers.says = report()
    await world.settle()
    return world


def rollouts_of(world: World) -> set[str]:
    return {name for name in world.there("Job") if "trainer" not in name}


async def test_no_more_than_replicas_at_once() -> None:
    world = await world_of(replicas=2)
    assert "calculator-rollout" not in world.there("Deployment")
    world.trainers.wants = wanted("a", "b", "c")
    await world.settle()
    assert rollouts_of(world) == {job_name("a"), job_name("b")}
    assert {job_name("a"), job_name("b")} <= world.there("Secret")
    world.trainers.wants = wanted("c")
    await world.settle()
    assert rollouts_of(world) == {job_name("a"), job_name("b")}, "none has ended"
    world.cluster.end_job(job_name("a"))
    await world.settle()
    assert rollouts_of(world) == {job_name("b"), job_name("c")}
    assert job_name("a") not in world.there("Secret")
    assert world.trainers.told_lost == []


async def test_a_pool_of_which_no_job_would_be_taken_is_refused_before_the_start() -> None:
    """The first Job of a rollout comes when the trainer works: the API server is asked before."""
    world = World()
    world.cluster.refuses[job_name("sample")] = "volumeMounts[0].name: Not found"
    world.cluster.put(storage_secret())
    world.cluster.put(pool(isolation="Job"))
    world.cluster.put(run())
    await world.settle()
    assert (world.status()["phase"], world.status()["reason"]) == ("Pending", "InvalidSpec")
    assert "volumeMounts[0].name: Not found" in world.status()["message"]
    assert {verb for verb, ref in world.cluster.writes if ref.kind != "Event"} == {"rehearse", "status"}
    world.cluster.refuses.clear()
    world.cluster.change("RolloutPool", "calc", {"spec": {"limits": {"seconds": 60}}})
    await world.settle()
    assert world.status()["phase"] == "Starting"
    assert world.there("Job") == {"calculator-trainer-1"}
    before = len(world.cluster.writes)
    await world.controller.resync()
    await world.settle()
    assert world.cluster.writes[before:] == [], "asked once"


async def test_a_job_that_failed_is_told_before_it_goes() -> None:
    world = await world_of()
    world.trainers.wants = wanted("a")
    await world.settle()
    world.trainers.wants = ()
    said, world.trainers.says = world.trainers.says, None
    world.cluster.end_job(job_name("a"), code=137, disrupted=True)
    for _ in range(3):
        await world.controller.resync()
        for item in list(world.cache.of_kind("TrainingRun")):
            await world.look(item)
    assert rollouts_of(world) == {job_name("a")}, "the queue does not know yet"
    world.trainers.says = said
    await world.settle()
    assert [(lost.rollout, lost.number, lost.outcome) for lost in world.trainers.told_lost] == [
        ("a", 1, "Infrastructure")
    ]
    assert rollouts_of(world) == set()


async def test_a_silent_queue_is_asked_once_however_much_it_is_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await world_of()
    world.trainers.wants = wanted("a", "b")
    await world.settle()
    asked: list[str] = []

    async def silent(url: str, credential: str, lost: LostRollout) -> None:
        asked.append(lost.rollout)
        raise TrainerSilentError(url)

    monkeypatch.setattr(world.trainers, "lost", silent)
    for name in ("a", "b"):
        world.cluster.end_job(job_name(name), code=1)
    world.deliver()
    await world.look(next(iter(world.cache.of_kind("TrainingRun"))))
    assert len(asked) == 1
    assert rollouts_of(world) == {job_name("a"), job_name("b")}


async def test_creation_keeps_to_its_rate() -> None:
    world = await world_of(replicas=50, per_second=1.0)
    world.trainers.wants = wanted(*(f"r{number}" for number in range(50)))
    world.deliver()
    await world.ask()
    for item in list(world.cache.of_kind("TrainingRun")):
        wait = await world.look(item)
        assert wait is not None and 0 < wait <= 1.0
    assert len(rollouts_of(world)) == 1, "one second's worth"


async def test_an_image_that_is_not_allowed_is_the_tasks_fault() -> None:
    world = await world_of()
    world.trainers.wants = wanted("a", image="elsewhere/x") + wanted("b", image="agents/y")
    await world.settle()
    assert rollouts_of(world) == {job_name("b")}
    told = [(lost.rollout, lost.outcome) for lost in world.trainers.told_lost]
    assert told == [("a", names.CLASS_INVALID_TASK)]


@pytest.mark.parametrize("error", [RefusedError, ForbiddenError])
async def test_a_task_that_the_api_server_refuses_holds_up_no_other(error: type[ClusterError]) -> None:
    """Quantities that parse, and that no Job may have together; or a policy against its image."""
    cluster = Choosy()
    world = await world_of(cluster=cluster)
    world.trainers.wants = wanted("gone")
    await world.settle()
    cluster.end_job(job_name("gone"), code=137, disrupted=True)
    why = "spec.template.spec.containers[0].resources.requests: must be less than or equal to memory limit"
    cluster.no["agents/bad"] = error("apply Job team-a/x", 422, why)
    world.trainers.wants = wanted("a", image="agents/bad") + wanted("b")
    await world.settle()
    assert rollouts_of(world) == {job_name("b")}
    told = {lost.rollout: lost for lost in world.trainers.told_lost}
    assert {name: lost.outcome for name, lost in told.items()} == {
        "gone": names.CLASS_INFRASTRUCTURE,
        "a": names.CLASS_INVALID_TASK,
    }
    assert why in told["a"].message
    assert world.status()["phase"] == "Running"
    world.trainers.wants = ()
    await world.settle()
    await world.controller.resync()
    await world.settle()
    assert world.there("Secret") == {"storage-keys", "calculator-keys", job_name("b")}
    assert len(world.trainers.told_lost) == 2


async def test_what_refuses_every_job_is_no_tasks_fault() -> None:
    cluster = Choosy()
    world = await world_of(cluster=cluster)
    refused = RefusedError("apply Job team-a/x", 422, "no Jobs on Mondays")
    world.trainers.wants = wanted("gone")
    await world.settle()
    cluster.end_job(job_name("gone"), code=137, disrupted=True)
    cluster.no = {"agent:1": refused, "agents/b": refused}
    world.trainers.wants = wanted("a", image="agents/b")
    await world.settle()
    assert [lost.rollout for lost in world.trainers.told_lost] == ["gone"], "which is told all the same"
    assert (world.status()["phase"], world.status()["reason"]) == ("Running", "InvalidSpec")
    assert "no Jobs on Mondays" in world.status()["message"]


async def test_a_full_quota_is_no_tasks_fault() -> None:
    """Between two requests another Job may have made room."""
    cluster = Choosy()
    world = await world_of(cluster=cluster)
    cluster.no["agents/b"] = ForbiddenError("apply Job team-a/x", 403, "exceeded quota: jobs")
    world.trainers.wants = wanted("a", image="agents/b")
    world.deliver()
    await world.ask()
    with pytest.raises(ForbiddenError):
        await world.look(next(iter(world.cache.of_kind("TrainingRun"))))
    del cluster.no["agents/b"]
    await world.settle()
    assert rollouts_of(world) == {job_name("a")}
    assert world.trainers.told_lost == []


async def test_suspending_takes_rollouts_away_with_their_secrets() -> None:
    world = await world_of()
    world.trainers.wants = wanted("a", "b")
    await world.settle()
    world.trainers.wants = ()
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    assert world.status()["phase"] == "Suspended"
    assert world.there("Job") == set()
    assert world.there("Secret") == {"storage-keys", "calculator-keys"}


@pytest.mark.parametrize("number", [1, 2])
async def test_the_next_try_has_a_job_of_its_own(number: int) -> None:
    world = await world_of()
    world.trainers.wants = wanted("a", number=number)
    await world.settle()
    assert rollouts_of(world) == {job_name("a", number)}


async def test_a_secret_that_no_job_uses_goes() -> None:
    world = await world_of()
    world.trainers.wants = wanted("a", "b")
    await world.settle()
    world.trainers.wants = ()
    left = copy.deepcopy(world.cluster.find("Secret", job_name("a")))
    assert left is not None
    # someone deletes the Job; and a process ended before it made one
    world.cluster.remove(KINDS["Job"].ref(NAMESPACE, job_name("a")))
    left["metadata"]["name"] = job_name("z")
    world.cluster.put(left)
    await world.controller.resync()
    await world.settle()
    assert world.there("Secret") == {"storage-keys", "calculator-keys", job_name("b")}


async def test_the_secret_of_a_rollout_that_waits_for_its_job_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = await world_of()
    apply = world.cluster.apply

    async def only_secrets(manifest: Manifest) -> Manifest:
        if manifest["kind"] == "Job":
            raise UnavailableError("apply", 503, "later")
        return await apply(manifest)

    with monkeypatch.context() as away:
        away.setattr(world.cluster, "apply", only_secrets)
        world.trainers.wants = wanted("a")
        await world.ask()
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await world.look(next(iter(world.cache.of_kind("TrainingRun"))))
    assert job_name("a") in world.there("Secret")
    assert ("delete", KINDS["Secret"].ref(NAMESPACE, job_name("a"))) not in world.cluster.writes


async def test_a_pause_takes_secrets_without_jobs_away_too() -> None:
    world = await world_of()
    world.trainers.wants = wanted("a")
    await world.settle()
    world.trainers.wants = ()
    world.cluster.remove(KINDS["Job"].ref(NAMESPACE, job_name("a")))
    world.cluster.change("TrainingRun", "calculator", {"spec": {"suspend": True}})
    await world.settle()
    assert world.there("Secret") == {"storage-keys", "calculator-keys"}
