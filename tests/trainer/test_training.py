"""Runs with a learner: weights to the policy servers, validation, checkpoints, agreement of sampler and trainer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kitestring_api import names
from kitestring_rollout.protocol.queue import Finish, Lease
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.driver import RunResult, run
from kitestring_trainer.learner import Agreement
from tests.trainer.scripted_learner import AGREED, APART, NO_TOKENS, ScriptedLearner, weights_name
from tests.trainer.world import QUICK, FakePolicyServer, World, ended

TASKS = {"inline": [{"question": str(i), "answer": f"a{i}"} for i in range(4)]}


class Training:
    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.servers: list[FakePolicyServer] = [world.add_policy_server()]
        self.agreement: Callable[[int], Agreement] = lambda step: AGREED
        self.wait_to_learn: Callable[[], object] = lambda: None
        self.right: Callable[[Lease], bool] = lambda lease: lease.rollout.endswith("-000")
        world.agent = self._agent
        monkeypatch.setattr("kitestring_trainer.driver.make_learner", self._make_learner)
        monkeypatch.setattr("kitestring_trainer.serving.WATCH_SECONDS", 0.02)

    def run(self, **changes: Any) -> RunResult:
        self.world.start_workers()
        config = self.world.config(
            spec__trainer={"backend": "verl", "device": "cpu"},
            model=self.world.model,
            policy_servers=tuple(server.url for server in self.servers),
            **changes,
        )
        return run(config, self.world.announce)

    def _make_learner(self, config: TrainerConfig, resumed_step: int) -> ScriptedLearner:
        return ScriptedLearner(config, resumed_step, self._crash, self.agreement)

    def _crash(self, where: str, step: int) -> None:
        if where == "before it starts":
            self.wait_to_learn()

    async def _agent(self, world: World, lease: Lease) -> Finish:
        server = self.servers[0]
        world.gateway.record(lease.attempt, version=server.version, tool_calls=int(self.right(lease)))
        return ended(lease, f"a{lease.task['question']}" if self.right(lease) else "wrong")

    def index(self) -> Any:
        return json.loads((self.world.folder / "run" / "checkpoints" / "checkpoints.json").read_text())


@pytest.fixture
def training(world: World, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(world, monkeypatch)


def test_every_server_gets_the_weights_while_calls_are_held(training: Training) -> None:
    training.servers.append(training.world.add_policy_server())
    training.run()
    for server in training.servers:
        assert server.version == "1.2"
        assert not server.paused
        change = ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume", "weight_info"]
        assert [said for said in server.said if said != "weight_info"] == change[:-1] * 3
    assert training.world.gateway.held == ["policy"] * 3
    assert training.world.gateway.released == ["1.0", "1.1", "1.2"]
    assert weights_name(training.servers[0].folder) == weights_name(training.servers[1].folder)


def test_a_release_that_is_lost_is_said_again(training: Training) -> None:
    training.world.gateway.deaf = 3
    training.run()
    assert training.world.gateway.deaf == 0
    assert training.world.gateway.released == ["1.0", "1.1", "1.2"]


def test_a_server_that_cannot_now_is_asked_again(training: Training) -> None:
    training.servers[0].fail_next = 2
    assert training.run().exit_code == 0
    assert training.servers[0].version == "1.2"


def test_a_server_that_refuses_ends_the_run(training: Training) -> None:
    training.servers[0].refuse = True
    result = training.run()
    assert (result.phase, result.reason, result.exit_code) == ("Failed", "WeightsNotServed", 3)
    assert "collective_rpc refused: 400" in (result.message or "")


def test_a_server_that_was_restarted_gets_the_current_weights_again(training: Training) -> None:
    """Rollouts sampled meanwhile from its initial weights are not trained on."""
    restarted = threading.Event()
    server = training.servers[0]

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.step == 2 and not restarted.is_set():
            restarted.set()
            server.version, server.folder = "start", None
        return await training._agent(world, lease)

    training.world.agent = agent
    result = training.run(pool__attempts__max=20)
    assert result.rollouts == {"Succeeded": 12}
    rollouts = training.world.commit("t000002")["rollouts"]
    assert max(rollout["tries"] for rollout in rollouts) > 1
    assert server.version == "1.2"


def test_validation_before_every_and_after(training: Training) -> None:
    training.right = lambda lease: lease.mode == names.MODE_VALIDATION_GREEDY or lease.task_index < lease.step
    result = training.run(
        spec__steps=4,
        spec__tasks__validation=TASKS,
        spec__validation={"before": True, "every": 2, "after": True, "sampledRepeats": 2},
    )
    sampled = [
        (v["step"], v["reward"], v["rollouts"], v["scored"]) for v in result.validation if "sampled" in v["mode"]
    ]
    assert sampled == [(0, 0.0, 8, 8), (2, 0.5, 8, 8), (4, 1.0, 8, 8)]
    greedy = [
        (v["step"], v["reward"], v["rollouts"], v["tool_use"]) for v in result.validation if "greedy" in v["mode"]
    ]
    assert greedy == [(0, 1.0, 4, 1.0), (2, 1.0, 4, 1.0), (4, 1.0, 4, 1.0)]
    tool_use = [v["tool_use"] for v in result.validation if "sampled" in v["mode"]]
    assert tool_use == [0.0, 0.5, 1.0]
    commit = training.world.commit("s000002")
    assert commit["mode"] == "validation-sampled" and commit["policy_version"] == "1.2"
    assert commit["validation"]["reward"] == 0.5
    lines = training.world.metrics()
    assert [(line["step"], len(line["validation"])) for line in lines] == [(0, 2), (1, 0), (2, 2), (3, 0), (4, 2)]
    assert result.rollouts == {"Succeeded": 24}, "validation is no part of the training rollouts"


def test_validation_before_runs_while_the_learner_starts(training: Training) -> None:
    validated = threading.Event()
    training.world.on_answer = lambda lease: validated.set()
    in_time: list[bool] = []
    training.wait_to_learn = lambda: in_time.append(validated.wait(20))
    result = training.run(spec__tasks__validation=TASKS, spec__validation={"before": True, "after": False})
    assert in_time == [True]
    assert [found["step"] for found in result.validation] == [0, 0]
    assert training.world.commit("g000000")["policy_version"] in (None, "1.0")


def test_the_latest_checkpoints_and_the_best_stay(training: Training) -> None:
    good = {0: 0, 1: 1, 2: 4, 3: 2, 4: 3, 5: 3}
    training.right = lambda lease: lease.task_index < good[lease.step]
    result = training.run(
        spec__steps=5,
        spec__tasks__validation=TASKS,
        spec__validation={"before": False, "every": 1, "greedy": False},
        spec__checkpoints={"every": 1, "keep": 2},
    )
    folder = training.world.folder / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000004", "step-000005"]
    assert training.index()["best"] == {"folder": "step-000002", "step": 2, "reward": 1.0}
    assert training.index()["latest"]["step"] == 5
    assert result.checkpoint == str(folder / "step-000005")
    assert weights_name(result.checkpoint) == weights_name(training.servers[0].folder)


def test_only_the_last_step_is_exported_with_every_0(training: Training) -> None:
    result = training.run(spec__steps=3, spec__checkpoints={"every": 0})
    assert [exported["step"] for exported in training.index()["exported"]] == [3]
    assert result.checkpoint is not None


def test_a_step_where_sampler_and_trainer_disagree_is_degraded_and_never_the_best(training: Training) -> None:
    training.agreement = lambda step: APART if step == 2 else AGREED
    training.right = lambda lease: lease.step == 2 or lease.task_index == 0
    result = training.run(
        spec__steps=3,
        spec__tasks__validation=TASKS,
        spec__validation={"before": False, "every": 1, "greedy": False},
        spec__checkpoints={"every": 1},
    )
    assert result.exit_code == 0
    assert [line["degraded"] for line in training.world.metrics()] == [False, True, False]
    assert training.index()["best"]["step"] in (1, 3)
    assert [line["agreement_correlation"] for line in training.world.metrics()] == [0.99999, 0.9, 0.99999]


def test_three_such_steps_in_a_row_fail_the_run(training: Training) -> None:
    agreements = {2: APART, 3: APART, 4: AGREED, 5: APART, 6: NO_TOKENS, 7: APART, 8: APART}
    training.agreement = lambda step: agreements.get(step, AGREED)
    result = training.run(spec__steps=9)
    assert (result.phase, result.reason, result.step) == ("Failed", "ProbabilitiesDiverge", 8)
    assert result.message == "3 steps in a row, step 8: mean KL of sampler and trainer is 0.1 nats, bound 0.002"


def test_a_stop_does_not_wait_for_weights_that_do_not_arrive(training: Training) -> None:
    """A push may take half an hour; what it pushes is saved, and pushed again by the next process."""
    server = training.servers[0]
    changes: dict[str, Any] = {"spec__checkpoints": {"resumeEvery": 100}}

    async def stall() -> None:
        if server.said.count("collective_rpc") == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    server.on_load = stall
    result = training.run(**changes)
    assert (result.reason, result.exit_code, result.step) == ("Interrupted", 143, 0)
    states = training.world.folder / "run" / "checkpoints"
    assert [path.name for path in states.glob("state-*")] == ["state-000001"], "its updates are made"
    server.on_load = None
    training.world.listening.clear()
    result = training.run(**changes, resume=True)
    assert (result.phase, server.version, server.paused) == ("Finished", "2.2", False)
    assert training.world.commit("t000001")["incarnation"] == 1


def test_a_stop_waits_for_storage_only_so_long(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not get there in time is made again from the state before."""
    forever = threading.Event()

    def never(*_: object) -> None:
        forever.wait(60)

    monkeypatch.setattr("kitestring_trainer.artifacts.publish_folder", never)

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return await training._agent(world, lease)

    training.world.agent = agent
    result = training.run(artifacts=True, spec__checkpoints={"every": 0}, timing=QUICK.model_copy(update={"stop": 0.3}))
    forever.set()
    assert (result.reason, result.exit_code, result.step) == ("Interrupted", 143, 1)


def test_a_stop_during_a_validation_loses_no_finished_update(training: Training) -> None:
    """With resumable states written at a stop only: step 1 is updated when SIGTERM comes in its validation."""
    stopped = threading.Event()

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.mode == names.MODE_VALIDATION_SAMPLED and lease.step == 1 and not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return await training._agent(world, lease)

    training.world.agent = agent
    changes: dict[str, Any] = {
        "spec__steps": 2,
        "spec__tasks__validation": TASKS,
        "spec__validation": {"before": False, "every": 1, "greedy": False},
        "spec__checkpoints": {"resumeEvery": 100},
    }
    result = training.run(**changes)
    assert (result.reason, result.exit_code, result.step) == ("Interrupted", 143, 1)
    states = training.world.folder / "run" / "checkpoints"
    assert [path.name for path in states.glob("state-*")] == ["state-000001"]
    training.world.listening.clear()
    result = training.run(**changes, resume=True)
    assert (result.phase, [found["step"] for found in result.validation]) == ("Finished", [1, 2])
    assert training.world.commit("t000001")["incarnation"] == 1, "step 1 is not made again"
    assert training.world.commit("t000002")["incarnation"] == 2
