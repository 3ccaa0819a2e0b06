"""Executors of one rollout each: what is wanted, who may have it, and what becomes of one that ends without a word."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api import names
from kitestring_rollout.protocol.queue import Lease, Leases, WantedRollout, WantedRollouts
from kitestring_trainer.driver import run
from kitestring_trainer.queue.executors import PerTask, credential_for, pod_problem, rollout_of
from kitestring_trainer.tasks import Task
from tests.trainer.world import QUEUE_CREDENTIAL, QUICK, World, answer_right, ended

ONE_STEP = {"spec__steps": 1, "spec__rollouts__tasksPerStep": 1}
RULES = PerTask("image", "resources", ("registry/agents/*", "python:3.11"))


@given(rollout=st.text(min_size=1), key=st.text(min_size=1), other=st.text(min_size=1))
def test_a_credential_opens_its_rollout_under_its_key_only(rollout: str, key: str, other: str) -> None:
    credential = credential_for(rollout, key)
    assert rollout_of(credential, key) == rollout
    if other != key:
        assert rollout_of(credential, other) is None
    if other != rollout:
        assert rollout_of(other + credential[len(rollout) :], key) is None


@pytest.mark.parametrize("nonsense", ["", ".", "t1", "t1.", ".abc", "ü.ö", "\udce4.x"])
def test_what_is_no_credential_opens_nothing(nonsense: str) -> None:
    assert rollout_of(nonsense, "key") is None


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, None),
        ({"image": "python:3.11", "resources": {"limits": {"cpu": 2, "memory": "1Gi"}}}, None),
        ({"image": "evil:1"}, "spec.allowedImages does not allow"),
        ({"image": 3}, "spec.perTask.imageField"),
        ({"resources": {"limits": {"cpu": True}}}, "spec.perTask.resourcesField"),
        ({"resources": {"claims": {}}}, "spec.perTask.resourcesField"),
        ({"resources": "all"}, "spec.perTask.resourcesField"),
    ],
)
@pytest.mark.parametrize("hidden", [True, False])
def test_what_a_task_may_ask_for(row: dict[str, Any], problem: str | None, hidden: bool) -> None:
    found = pod_problem(Task({}, row) if hidden else Task(row, {}), RULES)
    assert found is None if problem is None else problem in (found or "")


class Cluster:
    """Plays the operator: starts an executor for whatever is wanted, until the run has ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: list[WantedRollout] = []
        self.answers: list[tuple[str, int]] = []
        world.backstage.submit(self._work())

    async def _work(self) -> None:
        await asyncio.to_thread(self.world.listening.wait)
        async with aiohttp.ClientSession(self.world.queue_url) as session:
            known: set[tuple[str, int]] = set()
            while True:
                try:
                    status, text = await ask(session, "GET", f"{names.ROUTE_QUEUE_WANTED}?limit=10")
                except aiohttp.ClientError:
                    return
                if status == 410:
                    return
                for wanted in WantedRollouts.model_validate_json(text).rollouts:
                    if (wanted.rollout, wanted.number) not in known:
                        known.add((wanted.rollout, wanted.number))
                        self.seen.append(wanted)
                        await self.executor(session, wanted)
                await asyncio.sleep(0.01)

    async def executor(self, session: aiohttp.ClientSession, wanted: WantedRollout) -> None:
        leased = await self.lease(session, wanted)
        await self.finish(session, wanted, leased)

    async def lease(self, session: aiohttp.ClientSession, wanted: WantedRollout) -> Lease:
        body = {"executor": "job", "capacity": 1, "wait_seconds": 5, "rollout": wanted.rollout}
        status, text = await ask(session, "POST", names.ROUTE_QUEUE_LEASE, body, wanted.credential)
        assert status == 200, text
        (leased,) = Leases.model_validate_json(text).leases
        assert leased.rollout == wanted.rollout
        return leased

    async def finish(self, session: aiohttp.ClientSession, wanted: WantedRollout, leased: Lease) -> None:
        done = await answer_right(self.world, leased)
        path = names.ROUTE_QUEUE_FINISH.format(lease=leased.lease)
        status, _ = await ask(session, "POST", path, done.model_dump(mode="json"), wanted.credential)
        self.answers.append(("finish", status))

    async def lost(self, session: aiohttp.ClientSession, wanted: WantedRollout, outcome: str, message: str) -> Any:
        path = names.ROUTE_QUEUE_LOST.format(rollout=wanted.rollout)
        body = {"number": wanted.number, "outcome": outcome, "message": message}
        return await ask(session, "POST", path, body)


async def ask(
    session: aiohttp.ClientSession, method: str, path: str, body: Any = None, credential: str = QUEUE_CREDENTIAL
) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {credential}"}
    async with session.request(method, path, json=body, headers=headers) as response:
        return response.status, await response.text()


def outcome_of(world: World, cluster: type[Cluster], **changes: Any) -> tuple[Cluster, list[Any]]:
    playing = cluster(world)
    result = run(world.config(**(ONE_STEP | changes)), world.announce)
    assert result.exit_code == 0
    return playing, world.commit("t000001")["rollouts"]


def test_a_run_by_executors_of_one_rollout_each(world: World) -> None:
    playing, rollouts = outcome_of(world, Cluster)
    assert [(r["class"], r["tries"], r["reward"]) for r in rollouts] == [
        ("Succeeded", 1, reward) for reward in (1.0, 0.0, 0.0)
    ]
    assert sorted(wanted.rollout for wanted in playing.seen) == sorted(r["rollout"] for r in rollouts)
    assert playing.answers == [("finish", 200)] * 3


def test_a_credential_of_one_rollout_reaches_no_other(world: World) -> None:
    tried: list[int] = []

    class Thief(Cluster):
        async def executor(self, session: aiohttp.ClientSession, wanted: WantedRollout) -> None:
            leased = await self.lease(session, wanted)
            if self.seen[0] is not wanted and not tried:
                body = {"executor": "job", "capacity": 1, "wait_seconds": 0}
                stolen = self.seen[0].credential
                lease = names.ROUTE_QUEUE_LEASE
                tried.append((await ask(session, "POST", lease, body, stolen))[0])
                tried.append((await ask(session, "POST", lease, body | {"rollout": wanted.rollout}, stolen))[0])
                tried.append((await ask(session, "GET", f"{names.ROUTE_QUEUE_WANTED}?limit=1", None, stolen))[0])
                tried.append((await ask(session, "GET", names.ROUTE_RUN_STATUS, None, stolen))[0])
                path = names.ROUTE_QUEUE_FINISH.format(lease=leased.lease)
                forged = ended(leased, "forged").model_dump(mode="json")
                tried.append((await ask(session, "POST", path, forged, stolen))[0])
                path = names.ROUTE_QUEUE_LOST.format(rollout=wanted.rollout)
                lost = {"number": 1, "outcome": "Infrastructure", "message": "x"}
                tried.append((await ask(session, "POST", path, lost, stolen))[0])
                gone = {**body, "rollout": self.seen[0].rollout}
                tried.append((await ask(session, "POST", lease, gone, stolen))[0])
            await self.finish(session, wanted, leased)

    _, rollouts = outcome_of(world, Thief)
    assert tried[:6] == [401] * 6
    assert tried[6] in (200, 404), "its own has ended"
    assert [(r["class"], r["tries"], r["reward"]) for r in rollouts] == [
        ("Succeeded", 1, reward) for reward in (1.0, 0.0, 0.0)
    ]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("Infrastructure", "executor lost: Evicted: the node was low on memory"),
        ("AgentFailed", "ended by signal 9: Evicted: the node was low on memory"),
        ("TimedOut", "no end within 60 s"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
def test_an_executor_that_ends_without_a_word_is_what_the_cluster_says(
    world: World, outcome: str, reason: str, begun: bool
) -> None:
    """Of one that had leased nothing no agent can have failed."""

    class Evicting(Cluster):
        async def executor(self, session: aiohttp.ClientSession, wanted: WantedRollout) -> None:
            if wanted.rollout.endswith("-000"):
                if begun:
                    await self.lease(session, wanted)
                message = "Evicted: the node was low on memory"
                assert await self.lost(session, wanted, outcome, message) == (200, '{"changed":true}')
                assert await self.lost(session, wanted, outcome, message) == (200, '{"changed":false}'), "said twice"
                return
            await super().executor(session, wanted)

    timing = QUICK.model_copy(update={"lease": 60.0})
    playing, rollouts = outcome_of(world, Evicting, pool__attempts__max=2, timing=timing)
    expected = outcome if begun else "Infrastructure"
    tries = 2 if expected == "Infrastructure" else 1
    assert (rollouts[0]["class"], rollouts[0]["tries"], rollouts[0]["reward"]) == (expected, tries, None)
    assert rollouts[0]["reason"] == (reason if begun else "Evicted: the node was low on memory")
    assert [w.number for w in playing.seen if w.rollout.endswith("-000")] == list(range(1, tries + 1))


async def test_the_routes_refuse_nonsense(world: World) -> None:
    answers: dict[str, int] = {}

    class Asking(Cluster):
        async def executor(self, session: aiohttp.ClientSession, wanted: WantedRollout) -> None:
            path = names.ROUTE_QUEUE_LOST.format(rollout=wanted.rollout)
            for limit in ("", "0", "x", "-1", "10001"):
                answers[f"limit {limit}"] = (await ask(session, "GET", f"{names.ROUTE_QUEUE_WANTED}?limit={limit}"))[0]
            for outcome in ("Succeeded", "Lost"):
                body = {"number": 1, "outcome": outcome, "message": ""}
                answers[outcome] = (await ask(session, "POST", path, body))[0]
            await super().executor(session, wanted)

    await asyncio.to_thread(outcome_of, world, Asking)
    assert set(answers.values()) == {422}
    assert len(answers) == 7


def test_a_task_names_its_image_and_one_that_is_not_allowed_is_invalid(world: World) -> None:
    rows = [
        {"question": "0", "answer": "a0", "image": "python:3.12", "resources": {"limits": {"cpu": "1"}}},
        {"question": "1", "answer": "a1", "image": "evil:1"},
    ]
    playing, rollouts = outcome_of(
        world,
        Cluster,
        pool__isolation="Job",
        pool__allowedImages=["python:3.12"],
        pool__perTask={"imageField": "image", "resourcesField": "resources"},
        spec__tasks__train={"inline": rows},
        spec__rollouts__tasksPerStep=2,
    )
    assert {(w.image, str(w.resources)) for w in playing.seen} == {("python:3.12", "{'limits': {'cpu': '1'}}")}
    invalid = [r for r in rollouts if r["class"] == "InvalidTask"]
    assert len(invalid) == len(playing.seen) == 3
    assert all(
        "asks for image evil:1, which spec.allowedImages does not allow (python:3.12)" in r["reason"] for r in invalid
    )
