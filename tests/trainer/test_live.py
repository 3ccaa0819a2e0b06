"""What changes while a run goes on: its steps, gateways, policy servers; and what an earlier trainer left open."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from kitestring_api import names
from kitestring_rollout.protocol.queue import Finish, Lease
from kitestring_trainer.driver import run
from tests.trainer.scripted_learner import weights_name
from tests.trainer.test_training import TASKS, Training
from tests.trainer.world import QUEUE_CREDENTIAL, FakeGateway, World, answer_right


@pytest.fixture
def training(world: World, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr("kitestring_trainer.membership.JOIN_SECONDS", 0.02)
    return Training(world, monkeypatch)


async def put(world: World, change: Any, credential: str = QUEUE_CREDENTIAL) -> tuple[int, Any]:
    assert world.queue_url is not None
    headers = {"Authorization": f"Bearer {credential}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.put(world.queue_url + names.ROUTE_RUN_LIVE, json=change) as response,
    ):
        return response.status, await response.json()


async def status(world: World) -> Any:
    assert world.queue_url is not None
    headers = {"Authorization": f"Bearer {QUEUE_CREDENTIAL}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(world.queue_url + names.ROUTE_RUN_STATUS) as response,
    ):
        return await response.json()


def at(step: int, rollout: str, act: Callable[[World], Any]) -> Any:
    """An agent like any other, but that the first one of this name in this step first does something else."""
    done: list[Any] = []

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.step == step and lease.rollout.endswith(rollout) and not done:
            done.append(None)
            done[0] = await act(world)
        return await answer_right(world, lease)

    agent.done = done  # type: ignore[attr-defined]
    return agent


def test_more_steps_while_the_last_is_in_progress(world: World) -> None:
    async def act(world: World) -> Any:
        answers = [await put(world, {"steps": 3}), await put(world, {"steps": 3})]
        return answers, await status(world)

    world.agent = at(2, "-000", act)
    world.start_workers()
    result = run(world.config(spec__steps=2), world.announce)
    (((code, state), again), said) = world.agent.done[0]  # type: ignore[attr-defined]
    assert code == 200 and state["steps"] == 3 and again == (code, state)
    assert (said["steps"], said["step"], said["made_step"]) == (3, 2, 1)
    assert said["last_step_unix"] <= said["unix_time"]
    assert (result.phase, result.step, result.steps) == ("Finished", 3, 3)
    assert [line["step"] for line in world.metrics()] == [1, 2, 3]


def test_fewer_steps_end_the_run_after_the_one_in_progress(training: Training) -> None:
    """It is then validated and exported as any last step."""
    world, refused = training.world, []

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout == "t000003-00000004-000":
            refused.append(await put(world, {"steps": 1}))
            refused.append(await put(world, {"steps": 2}))
        return await training._agent(world, lease)

    world.agent = agent
    result = training.run(
        spec__steps=9,
        spec__tasks__validation=TASKS,
        spec__validation={"before": False, "after": True, "greedy": False},
        spec__checkpoints={"every": 0},
    )
    assert (refused[0][0], refused[0][1]["reason"]) == (409, "StepsMade")
    assert "2 steps are made already" in refused[0][1]["error"]
    assert refused[1][1]["steps"] == 3, "the step in progress is made"
    assert (result.phase, result.step, result.steps) == ("Finished", 3, 3)
    assert [found["step"] for found in result.validation] == [3]
    assert [exported["step"] for exported in training.index()["exported"]] == [3]


def test_what_is_wrong_changes_nothing(world: World) -> None:
    async def act(world: World) -> Any:
        return [
            await put(world, {"steps": 5}, credential="agent"),
            await put(world, {"steps": 0}),
            await put(world, {"gateways": []}),
            await put(world, {"gateways": ["not a url"]}),
            await put(world, {"replicas": 3}),
        ]

    world.agent = at(1, "-000", act)
    world.start_workers()
    result = run(world.config(), world.announce)
    codes = [code for code, _ in world.agent.done[0]]  # type: ignore[attr-defined]
    assert codes == [401, 422, 422, 422, 422]
    assert (result.step, result.rollouts) == (2, {"Succeeded": 12})


def test_gateways_come_and_go(world: World) -> None:
    """The new one opens the attempts from then on; the old one is spoken to until its own are over."""
    new = FakeGateway(world.backstage, world.store)
    new.epoch = "2" * 16
    states: list[Any] = []

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.step == 1:
            # All that is leased together was opened at the old one.
            if lease.rollout == "t000001-00000000-000":
                states.append(await put(world, {"gateways": [new.url]}))
            return await answer_right(world, lease)
        if lease.rollout == "t000002-00000002-000":
            states.append(await put(world, {"gateways": [new.url + "/"]}))
        world_gateway = world.gateway if lease.attempt in world.gateway.attempts else new
        world_gateway.record(lease.attempt)
        right = lease.rollout.endswith("-000")
        return Finish(
            attempt=lease.attempt,
            ended="exited",
            exit_code=0,
            output=f"a{lease.task['question']}" if right else "wrong",
            seconds=0.1,
        )

    world.agent = agent
    world.start_workers(capacity=6)
    result = run(world.config(), world.announce)
    assert result.rollouts == {"Succeeded": 12}
    assert [opened.step for opened in world.gateway.opens] == [1] * 6
    assert [opened.step for opened in new.opens] == [2] * 6
    assert states[0][1]["gateways"] == [new.url] and states[0][1]["gateways_leaving"] == [world.gateway.url]
    assert states[1][1]["gateways_leaving"] == []
    assert all(one.ended is not None for one in world.gateway.attempts.values())
    assert new.servers == [], "a run without policy servers has none to tell of"


def test_a_new_policy_server_has_the_weights_before_gateways_hear_of_it(training: Training) -> None:
    """It is not up when it is announced, and takes the next versions like the others; one that goes gets none."""
    world = training.world
    old = training.servers[0]
    new = world.add_policy_server()
    new.away = True
    heard = threading.Event()
    seen: list[tuple[str, str | None]] = []
    states: list[Any] = []

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout == "t000002-00000002-000":
            states.append(await put(world, {"policy_servers": [old.url, new.url]}))
            new.away = False
        if lease.step == 2:
            await asyncio.to_thread(heard.wait, 20)
        if lease.rollout == "t000003-00000004-000":
            states.append(await put(world, {"policy_servers": [new.url]}))
        return await training._agent(world, lease)

    def servers_told(servers: tuple[str, ...]) -> None:
        seen.append((new.version, new.folder))
        heard.set()

    world.agent = agent
    world.gateway.on_servers = servers_told
    result = training.run(spec__steps=4)
    assert result.exit_code == 0
    assert states[0][1]["policy_servers_joining"] == [new.url] and states[0][1]["policy_servers"] == [old.url]
    assert seen[0][0] == "1.1" and weights_name(seen[0][1]).startswith("step 1 made")
    assert world.gateway.servers == [(old.url, new.url), (new.url,)]
    assert (old.version, new.version) == ("1.2", "1.4")


def test_rollouts_wait_for_servers_that_start_from_storage(world: World) -> None:
    """In a cluster the trainer puts the model there first; a run without updates has its agents served by that one."""
    server = world.add_policy_server()
    offered: list[str] = []

    def start() -> None:
        while not world.store.exists("weights/current.json"):
            assert not world.leases
        offered.append(world.read("weights/current.json")["version"])
        server.start(offered[0])

    starting = threading.Thread(target=start)
    starting.start()

    async def agent(world: World, lease: Lease) -> Finish:
        assert server.version == "0.0"
        return await answer_right(world, lease)

    world.agent = agent
    world.start_workers()
    result = run(world.config(artifacts=True, model=world.model, policy_servers=(server.url,)), world.announce)
    starting.join()
    assert (result.phase, offered) == ("Finished", ["0.0"])
    assert server.said == ["0.0"], "nothing else is ever served"
    assert world.store.get("state/metrics.jsonl").count(b"\n") == 2
    assert not list(world.store.list("checkpoints/"))


@pytest.mark.parametrize("when", ["before the queue listens", "while servers are awaited"])
def test_a_stop_while_it_starts(world: World, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Servers that are awaited, for half an hour if need be, hold nothing up."""
    server = world.add_policy_server()
    server.away = True

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def store(config: Any) -> Any:
        if when == "before the queue listens":
            stop()
        return world.store

    monkeypatch.setattr("kitestring_trainer.driver.open_store", store)
    if when == "while servers are awaited":
        server.on_asked = stop
    result = run(world.config(artifacts=True, model=world.model, policy_servers=(server.url,)), world.announce)
    assert (result.reason, result.exit_code) == ("Interrupted", 143)


def test_what_an_earlier_trainer_left_open_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways outlive the trainer: tokens of its attempts must stop working, and nothing may count twice."""
    dead = threading.Event()

    class KilledError(BaseException):
        pass

    async def stays(world: World, lease: Lease) -> Finish:
        if lease.step == 2 and lease.rollout.endswith(("-001", "-002")):
            dead.set()
            await asyncio.Event().wait()
        return await answer_right(world, lease)

    monkeypatch.setattr("kitestring_trainer.queue.service.RolloutQueue.close", _die)
    monkeypatch.setattr("kitestring_trainer.queue.service.RolloutQueue._leave", lambda *_: None)
    world.agent = stays
    world.start_workers(capacity=6)

    def kill(thread: Any) -> None:
        dead.wait(20)
        thread.fail(KilledError())

    monkeypatch.setattr("kitestring_trainer.driver.QueueThread", _dying(kill))
    with pytest.raises(KilledError):
        run(world.config(), world.announce)
    monkeypatch.undo()
    left = {attempt for attempt, one in world.gateway.attempts.items() if one.ended is None}
    assert left
    world.agent = answer_right
    world.gateway.unheard = 2
    world.listening.clear()
    world.start_workers()
    result = run(world.config(resume=True), world.announce)
    assert (result.exit_code, result.rollouts) == (0, {"Succeeded": 12})
    for attempt in left:
        end = world.gateway.attempts[attempt].ended
        assert end is not None and end.outcome == "Infrastructure"
        assert end.reason == "superseded: another incarnation of the trainer had opened it"
    rollouts = world.commit("t000002")["rollouts"]
    assert not left & {rollout["attempt"] for rollout in rollouts}
    assert {rollout["tries"] for rollout in rollouts} == {1}, "they count as no try"
    assert world.commit("t000002")["superseded"] == []


def test_a_gateway_that_never_says_what_it_holds_opens_nothing(world: World) -> None:
    """The start does not wait for it: another one does the work."""
    silent = FakeGateway(world.backstage, world.store)
    silent.unheard = 10**6
    world.start_workers()
    result = run(world.config(gateways=(silent.url, world.gateway.url)), world.announce)
    assert result.rollouts == {"Succeeded": 12}
    assert silent.opens == []


def _dying(kill: Callable[[Any], None]) -> Any:
    from kitestring_trainer.queue.thread import QueueThread

    def make(*arguments: Any) -> QueueThread:
        thread = QueueThread(*arguments)
        threading.Thread(target=kill, args=(thread,), daemon=True).start()
        return thread

    return make


async def _die(queue: Any) -> None:
    """The process is gone: nobody says goodbye to gateways or executors."""
    queue._ended = True
    await queue._notify()
    queue._ticker.cancel()
    await asyncio.to_thread(queue._watch.stop)
    for task in list(queue._background):
        task.cancel()
