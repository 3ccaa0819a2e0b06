"""Runs that meet trouble of their own: storage away, the user's mistakes, stops, steps without a group."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from kitestring_rollout.protocol.queue import Finish, Lease
from kitestring_rollout.storage import DirectoryStore, ObjectInfo, StoreRefused, StoreUnavailable
from kitestring_trainer.config import Listener, read_config
from kitestring_trainer.driver import main, run
from kitestring_trainer.errors import UserMistakeError
from kitestring_trainer.incarnations import STOPPED
from tests.trainer.world import World, answer_right, ended


class FlakyStore(DirectoryStore):
    """A store that is away for the next `failures` requests, once `armed` requests have gone well."""

    armed = 0
    failures = 0
    failed = 0

    def _may_fail(self) -> None:
        if self.armed > 0:
            self.armed -= 1
        elif self.failures > 0:
            self.failures -= 1
            self.failed += 1
            raise StoreUnavailable("connection refused")

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._may_fail()
        super().put(key, data, if_absent=if_absent)

    def get(self, key: str) -> bytes:
        self._may_fail()
        return super().get(key)

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        self._may_fail()
        return super().list(prefix, start_after)


@pytest.mark.parametrize("armed", [0, 3, 4, 6, 9, 20])
def test_storage_that_is_away_only_delays(world: World, monkeypatch: pytest.MonkeyPatch, armed: int) -> None:
    store = FlakyStore(world.folder / "store")
    store.armed, store.failures = armed, 3
    monkeypatch.setattr("kitestring_trainer.driver.open_store", lambda config: store)
    world.start_workers()
    result = run(world.config(), world.announce)
    assert result.rollouts == {"Succeeded": 12}
    assert store.failed == 3
    assert all(rollout["tries"] == 1 for rollout in world.commit("t000002")["rollouts"])


def mistake(world: World, **changes: Any) -> str:
    """The one line that the user gets."""
    with pytest.raises(UserMistakeError) as caught:
        run(world.config(**changes), world.announce)
    result = world.result()
    assert (result["phase"], result["exit_code"], result["message"]) == ("Failed", 2, str(caught.value))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_empty_task_file(world: World, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n")
    assert mistake(world, train_tasks=path).startswith(f"{path}: no task in it; write one JSON object per line")


def test_a_missing_validation_file(world: World, tmp_path: Path) -> None:
    validation = {"path": "validation.jsonl"}
    path = tmp_path / "validation.jsonl"
    assert f"{path}: no such file" in mistake(world, spec__tasks__validation=validation, validation_tasks=path)


def test_rows_that_all_lack_the_named_field(world: World) -> None:
    rows = {"inline": [{"text": "x", "answer": "y"}]}
    message = mistake(world, spec__tasks__train=rows)
    assert "has no field 'question', which spec.agentProtocol.task.field names; its fields: answer, text" in message


def test_a_hidden_field_cannot_be_the_agents_task(world: World) -> None:
    message = mistake(world, spec__tasks__hiddenFields=["answer", "question"])
    assert "spec.agentProtocol.task.field is 'question', which spec.tasks.hiddenFields keeps from the agent" in message


def test_a_port_that_is_taken(world: World) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = mistake(world, queue=Listener(port=port))
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert "choose another port, or 0 for any free one" in message


def test_a_start_that_failed_for_the_users_sake_can_be_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserMistakeError("spec.trainer.overrides names no key of verl")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        mistake(world, queue=Listener(port=taken.getsockname()[1]))
    with monkeypatch.context() as patched:
        patched.setattr("kitestring_trainer.driver.make_learner", refuse)
        mistake(world)
    world.start_workers()
    assert run(world.config(), world.announce).phase == "Finished"


def test_storage_that_refuses_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(DirectoryStore):
        def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
            raise StoreRefused("bucket b at s3.example: AccessDenied: Access Denied.")

    monkeypatch.setattr("kitestring_trainer.driver.open_store", lambda config: Refusing(world.folder / "store"))
    message = mistake(world)
    assert message.startswith(
        "object storage (the run's folder) refuses this run: bucket b at s3.example: AccessDenied"
    )


def test_a_trainer_that_was_replaced_ends(world: World) -> None:
    """Cut off, it makes its step; meanwhile another process of the run has begun."""

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.step == 2:
            world.store.put("state/incarnations/000002.json", world.store.get("state/incarnations/000001.json"))
        return await answer_right(world, lease)

    world.agent = agent
    world.start_workers()
    result = run(world.config(), world.announce)
    assert (result.reason, result.exit_code) == ("AlreadyReplaced", 1)
    assert not world.store.exists("state/commits/t000002.json")


def test_a_credential_that_is_not_there(world: World) -> None:
    assert "credential file" in mistake(world, queue_credential_file=world.folder / "nothing")
    (world.folder / "blank").write_text("\n")
    assert "is empty" in mistake(world, gateway_credential_file=world.folder / "blank")


def test_a_run_is_not_begun_twice_by_accident(world: World) -> None:
    world.start_workers()
    run(world.config(spec__steps=1), world.announce)
    assert "go on with --resume" in mistake(world, spec__steps=1)


def test_a_config_file_that_is_wrong(world: World, tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    good = world.config().model_dump_json(by_alias=True)
    path.write_text(good)
    assert read_config(path) == world.config()
    for wrong, message in (
        (good.replace('"gateways"', '"gatways"'), "gateways: Field required"),
        (good.replace('"backend":"collect"', '"backend":"verl"'), "model and policy_servers are required"),
        ("{", "Invalid JSON"),
    ):
        path.write_text(wrong)
        with pytest.raises(UserMistakeError, match=message):
            main(path, resume=False, announce=world.announce)
    with pytest.raises(UserMistakeError, match="No such file"):
        main(tmp_path / "none.json", resume=False, announce=world.announce)


def test_sigterm_stops_between_steps_and_resume_goes_on(world: World) -> None:
    executions: Counter[str] = Counter()

    async def agent(world: World, lease: Lease) -> Finish:
        if lease.rollout == "t000002-00000003-002" and "stopped" not in executions:
            executions["stopped"] += 1
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        executions[lease.rollout] += 1
        return await answer_right(world, lease)

    world.agent = agent
    world.start_workers(capacity=6)
    before = signal.getsignal(signal.SIGTERM)
    result = run(world.config(), world.announce)
    assert (result.phase, result.reason, result.exit_code, result.step) == ("Failed", "Interrupted", 143, 1)
    assert "--resume goes on" in (result.message or "")
    assert signal.getsignal(signal.SIGTERM) is before
    ends = {one.opened.rollout: one.ended for one in world.gateway.attempts.values()}
    cut_off = ends["t000002-00000003-002"]
    assert cut_off is not None and cut_off.reason == STOPPED, "a gateway that is to end too does not wait for it"
    done = dict(world.answered)
    world.listening.clear()
    world.start_workers()
    result = run(world.config(resume=True), world.announce)
    assert (result.phase, result.exit_code, result.rollouts) == ("Finished", 0, {"Succeeded": 12})
    assert result.step == 2
    assert [executions[rollout] for rollout in done] == [1] * len(done)
    assert {line["step"] for line in world.metrics()} == {1, 2}
    assert world.commit("t000001")["incarnation"] == 1
    assert world.commit("t000002")["incarnation"] == 2
    assert world.commit("t000002")["superseded"] == []


def test_a_row_that_cannot_be_used_spoils_its_own_group_only(world: World) -> None:
    rows = [{"question": str(i), "answer": f"a{i}"} for i in range(3)] + [{"answer": "no question"}]
    world.start_workers()
    result = run(world.config(spec__tasks__train={"inline": rows}), world.announce)
    assert result.rollouts == {"Succeeded": 9, "InvalidTask": 3}
    invalid = [
        rollout
        for step in (1, 2)
        for rollout in world.commit(f"t00000{step}")["rollouts"]
        if rollout["class"] == "InvalidTask"
    ]
    assert len({rollout["group"] for rollout in invalid}) == 1
    assert invalid[0]["attempt"] is None and invalid[0]["tries"] == 0
    assert "has no field 'question'" in invalid[0]["reason"]
    assert len(world.gateway.opens) == 9


def test_a_group_that_is_too_small_is_skipped(world: World) -> None:
    async def agent(world: World, lease: Lease) -> Finish:
        if lease.group == "t000001-00000000" and not lease.rollout.endswith("-000"):
            return ended(lease, "", exit_code=1)
        return await answer_right(world, lease)

    world.agent = agent
    world.start_workers()
    run(world.config(spec__steps=1), world.announce)
    rollouts = world.commit("t000001")["rollouts"]
    assert rollouts[0]["class"] == "Succeeded"
    assert rollouts[0]["excluded"] == "group has 1 counted rollouts, minGroupSize is 2"
    assert [rollout["excluded"] for rollout in rollouts[3:]] == [None] * 3
    line = world.metrics()[0]
    assert (line["groups_planned"], line["groups_counted"], line["groups_skipped"]) == (2, 1, 1)
    assert line["reward_mean"] == pytest.approx(1 / 3)


async def always_fails(world: World, lease: Lease) -> Finish:
    return ended(lease, "", exit_code=1, log_tail="ModuleNotFoundError: No module named 'langgraph'\n")


def test_steps_without_a_group_are_skipped_until_it_is_too_many(world: World) -> None:
    world.agent = always_fails
    world.start_workers()
    config = world.config(spec__steps=9, spec__failurePolicy={"maxSkippedSteps": 2})
    result = run(config, world.announce)
    assert (result.phase, result.reason, result.exit_code, result.step) == ("Failed", "StepsSkipped", 3, 1)
    assert result.message == (
        "2 steps in a row: the last had no group to learn from; 6 of 6 rollouts: AgentFailed: exit code 1: "
        "ModuleNotFoundError: No module named 'langgraph'"
    )
    assert result.skipped_steps == 2
    assert [line["skipped"] for line in world.metrics()] == [True], "the step that failed the run has no update"


def test_a_step_between_skipped_ones_begins_the_count_anew(world: World) -> None:
    async def agent(world: World, lease: Lease) -> Finish:
        return await (answer_right if lease.step % 2 == 0 else always_fails)(world, lease)

    world.agent = agent
    world.start_workers()
    result = run(world.config(spec__steps=4, spec__failurePolicy={"maxSkippedSteps": 2}), world.announce)
    assert (result.phase, result.skipped_steps) == ("Finished", 2)


def test_what_became_of_every_transition_is_written_down(world: World) -> None:
    world.start_workers()
    run(world.config(spec__steps=1), world.announce)
    lines = zstandard.decompress(world.store.get("state/samples/t000001.jsonl.zst")).splitlines()
    records = [orjson.loads(line) for line in lines]
    assert len(records) == 6
    assert {record["rollout"] for record in records} == {r["rollout"] for r in world.commit("t000001")["rollouts"]}
    assert all(record["excluded"] is None and record["advantage"] is not None for record in records)
    assert sum(record["loss_weight"] * 2 for record in records) == pytest.approx(2.0), "one whole mean per update"


def test_a_collecting_trainer_imports_nothing_heavy() -> None:
    heavy = ("torch", "ray", "verl", "transformers", "pyarrow", "minio", "pandas")
    script = f"import sys, kitestring_trainer.driver; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_process_ends_with_143_when_it_is_stopped(world: World) -> None:
    """It is in the middle of a step, and ends at once; how, is in its termination log."""
    log, path = world.folder / "termination", world.folder / "trainer.json"
    path.write_text(world.config(termination_log=log).model_dump_json(by_alias=True))
    command = [sys.executable, "-m", "kitestring_cli", "trainer", "--config", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        world.announce(orjson.loads(process.stdout.readline())["listening"])
        leased = threading.Event()

        async def agent(world: World, lease: Lease) -> Finish:
            leased.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]

        world.agent = agent
        world.start_workers()
        assert leased.wait(20)
        process.terminate()
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()
    said = orjson.loads(log.read_bytes())
    assert (said["phase"], said["reason"], said["step"], said["exit_code"]) == ("Failed", "Interrupted", 0, 143)
