"""A trainer that dies anywhere and goes on: nothing is trained from other weights, nothing finished is run again."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitestring_api import names
from kitestring_rollout.protocol.queue import Finish, Lease
from kitestring_rollout.storage import Manifest, ObjectStore, S3StoreConfig, publish_folder, read_manifest
from kitestring_trainer.artifacts import location
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.driver import RunResult, run
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.queue.thread import QueueThread
from tests.trainer.scripted_learner import Killed, ScriptedLearner, Update, weights_name
from tests.trainer.world import World

STEPS = 4


class Lives:
    """A run that is begun again and again until it is through. `deaths` says where each life ends.

    With `fresh` every life begins on a machine that has nothing of the run: all comes from storage.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, *, fresh: bool = False, **changes: Any) -> None:
        self.world = world
        self.fresh = fresh
        self.server = world.add_policy_server()
        self.config = world.config(
            spec__trainer={"backend": "verl", "device": "cpu"},
            spec__steps=STEPS,
            spec__checkpoints={"every": 0, **changes.pop("checkpoints", {})},
            model=world.model,
            policy_servers=(self.server.url,),
            artifacts=fresh,
            **changes,
        )
        self.learners: list[ScriptedLearner] = []
        self.sampled: dict[str, str] = {}
        """attempt → name of the weights that its tokens were sampled from"""
        self.executions: Counter[str] = Counter()
        """rollout → times that its agent ran to its end"""
        self._death: tuple[str, int] | None = None
        self._counted = 0
        world.agent = self._agent
        world.on_answer = self._answered
        self._threads: list[QueueThread] = []
        monkeypatch.setattr("kitestring_trainer.driver.make_learner", self._make_learner)
        monkeypatch.setattr("kitestring_trainer.driver.QueueThread", self._make_thread)
        put_commit = Ledger.put_commit

        def put(ledger: Ledger, commit: Any, **arguments: Any) -> None:
            if commit.mode == names.MODE_TRAIN:
                self._crash("before the commit", commit.step)
            put_commit(ledger, commit, **arguments)

        monkeypatch.setattr(Ledger, "put_commit", put)

        def publish(store: ObjectStore, folder: Path, prefix: str, version: str) -> Manifest:
            step = int(prefix[-6:])
            if self._death == ("in the upload", step):
                file = next(path for path in folder.iterdir() if path.is_file())
                store.put_file(f"{prefix}/{file.name}", file)
                raise Killed
            return publish_folder(store, folder, prefix, version)

        monkeypatch.setattr("kitestring_trainer.artifacts.publish_folder", publish)

    def live(self, death: tuple[str, int] | None = None) -> RunResult | None:
        """One life; None when it met its death."""
        self._death = death
        self._counted = 0
        if self.fresh:
            shutil.rmtree(self.config.folder, ignore_errors=True)
        self.world.listening.clear()
        self.world.start_workers()
        config = self.config.model_copy(update={"resume": bool(self.learners)})
        try:
            return run(config, self.world.announce)
        except Killed:
            return None

    def _make_learner(self, config: TrainerConfig, resumed_step: int) -> ScriptedLearner:
        learner = ScriptedLearner(config, resumed_step, self._crash)
        self.learners.append(learner)
        return learner

    def _make_thread(self, *arguments: Any) -> QueueThread:
        self._threads.append(QueueThread(*arguments))
        return self._threads[-1]

    def _crash(self, where: str, step: int) -> None:
        if self._death == (where, step):
            raise Killed

    async def _agent(self, world: World, lease: Lease) -> Finish:
        self.sampled[lease.attempt] = weights_name(self.server.folder)
        world.gateway.record(lease.attempt, version=self.server.version)
        finish = self._finish(lease)
        self.executions[lease.rollout] += 1
        return finish

    def _answered(self, lease: Lease) -> None:
        if self._death == ("among the rollouts", lease.step):
            self._counted += 1
            if self._counted == 2:
                self._threads[-1].fail(Killed())

    def _finish(self, lease: Lease) -> Finish:
        right = lease.rollout.endswith("-000")
        output = f"a{lease.task['question']}" if right else "wrong"
        return Finish(attempt=lease.attempt, ended="exited", exit_code=0, output=output, seconds=0.1)

    @property
    def lineage(self) -> list[Update]:
        """The updates that made the last weights, in order."""
        updates = {update.after: update for learner in self.learners for update in learner.updates}
        name = weights_name(str(self.config.folder / "weights" / f"v{STEPS:06d}"))
        line: list[Update] = []
        while name != "initial":
            line.append(updates[name])
            name = updates[name].before
        return line[::-1]

    def check(self) -> None:
        """The books agree with what happened."""
        line = self.lineage
        assert [update.step for update in line] == list(range(1, STEPS + 1))
        for update in line:
            commit = self.world.commit(f"t{update.step:06d}")
            plan = self.world.read(f"state/plans/t{update.step:06d}.json")
            planned = [rollout for group in plan["groups"] for rollout in group["rollouts"]]
            assert [rollout["rollout"] for rollout in commit["rollouts"]] == planned
            counted = {r["rollout"]: r["attempt"] for r in commit["rollouts"] if r["excluded"] is None}
            assert update.rollouts <= set(counted)
            assert {self.sampled[attempt] for attempt in counted.values()} == {update.before}
            assert commit["policy_version"] is not None
        assert [line["step"] for line in self.world.metrics()] == list(range(1, STEPS + 1))


@pytest.fixture
def lives(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lives]:
    return partial(Lives, world, monkeypatch)


def test_a_run_without_deaths(lives: Callable[..., Lives]) -> None:
    run_once = lives()
    result = run_once.live()
    assert result is not None and result.exit_code == 0
    run_once.check()
    assert set(run_once.executions.values()) == {1}
    assert [run_once.world.commit(f"t{step:06d}")["policy_version"] for step in (1, 2, 3, 4)] == [
        "1.0",
        "1.1",
        "1.2",
        "1.3",
    ]
    assert run_once.world.gateway.released == ["1.0", "1.1", "1.2", "1.3", "1.4"]
    assert run_once.server.version == "1.4" and not run_once.server.paused


WHERES = (
    "among the rollouts",
    "before the commit",
    "before the update",
    "after the save",
    "after the push",
    "after the step",
)


@pytest.mark.parametrize("where", WHERES)
def test_a_death_at_any_point_costs_no_finished_rollout(lives: Callable[..., Lives], where: str) -> None:
    """With a resumable state after every step, what is finished is never run again."""
    run_twice = lives(checkpoints={"resumeEvery": 1})
    assert run_twice.live((where, 2)) is None
    done = dict(run_twice.world.answered)
    result = run_twice.live()
    assert result is not None and result.exit_code == 0
    run_twice.check()
    assert len(done) >= 8
    for rollout, attempt in done.items():
        assert run_twice.executions[rollout] == 1, "what was finished is not run again"
        committed = run_twice.world.commit(rollout[:7])["rollouts"]
        assert attempt in {r["attempt"] for r in committed}
    assert result.superseded == 0
    incarnation = run_twice.world.commit("t000002")["incarnation"]
    assert incarnation == (2 if where in ("among the rollouts", "before the commit") else 1)
    redone = [line.get("redone") for line in run_twice.world.metrics()]
    lost = None if where in ("after the save", "after the push") else False
    assert redone == [False, True if where == "before the update" else lost, False, False]


def test_rollouts_of_lost_weights_are_superseded(lives: Callable[..., Lives]) -> None:
    """State after step 2; dead after the commit of step 4: step 3 is made again from its commit, step 4 is not."""
    run_twice = lives(checkpoints={"resumeEvery": 2})
    assert run_twice.live(("before the update", 4)) is None
    assert run_twice.world.commit("t000004")["policy_version"] == "1.3"
    result = run_twice.live()
    assert result is not None
    run_twice.check()
    assert run_twice.world.commit("t000003")["incarnation"] == 1
    commit = run_twice.world.commit("t000004")
    assert (commit["incarnation"], commit["policy_version"]) == (2, "2.3")
    assert len(commit["superseded"]) == 6 and result.superseded == 6
    old = run_twice.world.read("state/superseded/t000004.000001.json")
    assert {r["attempt"] for r in old["rollouts"]} == set(commit["superseded"])
    assert all(run_twice.executions[r["rollout"]] == 2 for r in commit["rollouts"])


def test_a_validation_that_was_missed_is_made_up_for(lives: Callable[..., Lives]) -> None:
    tasks = {"inline": [{"question": str(i), "answer": f"a{i}"} for i in range(3)]}
    run_twice = lives(
        checkpoints={"resumeEvery": 1, "every": 2},
        spec__tasks__validation=tasks,
        spec__validation={"before": True, "every": 2, "after": True, "greedy": False},
    )
    assert run_twice.live(("after the push", 2)) is None
    result = run_twice.live()
    assert result is not None
    assert [found["step"] for found in result.validation] == [0, 2, 4]
    run_executions = [count for rollout, count in run_twice.executions.items() if rollout.startswith("s")]
    assert run_executions == [1] * 9, "none is run twice, none is left out"
    exported = run_twice.world.folder / "run" / "checkpoints"
    assert weights_name(str(exported / "step-000002")) == run_twice.lineage[1].after
    assert weights_name(str(exported / "step-000004")) == run_twice.lineage[3].after


def test_a_machine_that_has_nothing_of_the_run_goes_on_from_storage(lives: Callable[..., Lives]) -> None:
    """State and model are in storage; what a kill tore is not taken for one; the latest few stay, here and there."""
    run_on = lives(fresh=True, checkpoints={"every": 1, "keep": 2})
    assert run_on.live(("in the upload", 3)) is None
    store, learners = run_on.world.store, run_on.learners
    keys = {info.key for info in store.list("checkpoints/state/")}
    assert {key for key in keys if key.endswith("manifest.json")} == {
        "checkpoints/state/step-000001/manifest.json",
        "checkpoints/state/step-000002/manifest.json",
    }
    assert any(key.startswith("checkpoints/state/step-000003/") for key in keys), "half of it is there"
    result = run_on.live()
    assert result is not None and result.exit_code == 0
    assert learners[1].updates[0].step == 3 and learners[1].updates[0].before == learners[0].updates[1].after
    run_on.check()
    manifests = sorted(info.key for info in store.list("checkpoints/") if info.key.endswith("manifest.json"))
    assert manifests == [
        "checkpoints/state/step-000003/manifest.json",
        "checkpoints/state/step-000004/manifest.json",
        "checkpoints/step-000003/manifest.json",
        "checkpoints/step-000004/manifest.json",
    ]
    index = run_on.world.read("checkpoints/checkpoints.json")
    assert [exported["step"] for exported in index["exported"]] == [3, 4]
    assert result.checkpoint == str(run_on.world.folder / "store" / "checkpoints" / "step-000004")
    assert weights_name(result.checkpoint) == run_on.lineage[-1].after
    assert read_manifest(store, "checkpoints/step-000004").version == "2.4"
    lines = store.get("state/metrics.jsonl").splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_state_that_differs_from_its_manifest_is_passed_over(lives: Callable[..., Lives]) -> None:
    run_on = lives(fresh=True)
    assert run_on.live(("before the update", 4)) is None
    run_on.world.store.put("checkpoints/state/step-000003/weights_name", b"rotten")
    result = run_on.live()
    assert result is not None and result.exit_code == 0
    run_on.check()
    assert [update.step for update in run_on.learners[1].updates] == [3, 4]


def test_states_that_none_can_use_make_room_for_new_ones(lives: Callable[..., Lives]) -> None:
    """All that are in storage are torn: the run begins at 0, and what it then saves must not be let go of for them."""
    run_on = lives(fresh=True)
    assert run_on.live(("before the update", 4)) is None
    store = run_on.world.store
    for step in (2, 3):
        store.put(f"checkpoints/state/step-{step:06d}/weights_name", b"rotten")
    store.put("checkpoints/state/step-000004/weights_name", b"half of one, without a manifest")
    assert run_on.live(("before the update", 3)) is None
    manifests = [info.key for info in store.list("checkpoints/state/") if info.key.endswith("manifest.json")]
    assert {key: read_manifest(store, key.removesuffix("/manifest.json")).version for key in manifests} == {
        "checkpoints/state/step-000001/manifest.json": "2.1",
        "checkpoints/state/step-000002/manifest.json": "2.2",
    }
    result = run_on.live()
    assert result is not None and result.exit_code == 0
    run_on.check()
    assert [update.step for update in run_on.learners[2].updates] == [3, 4], "not from the beginning once more"


def test_a_state_of_a_process_that_was_replaced_is_passed_over(lives: Callable[..., Lives]) -> None:
    """Its upload came through after another incarnation had gone on from an older state, and died."""
    run_on = lives(fresh=True)
    assert run_on.live(("in the upload", 2)) is None
    late = run_on.config.folder / "checkpoints" / "state-000002"
    kept = run_on.world.folder / "late"
    shutil.copytree(late, kept)
    assert run_on.live(("before the update", 3)) is None
    publish_folder(run_on.world.store, kept, "checkpoints/state/step-000002", "1.2")
    result = run_on.live()
    assert result is not None and result.exit_code == 0
    assert run_on.learners[2].updates[0].before != (kept / "weights_name").read_text()
    run_on.check()


def test_a_checkpoint_in_a_bucket_has_an_address() -> None:
    config = S3StoreConfig(
        kind="s3", endpoint="s3:8333", bucket="runs", prefix="a/run-1", access_key_file="k", secret_key_file="s"
    )
    assert location(config, "checkpoints/step-000020") == "s3://runs/a/run-1/checkpoints/step-000020/"


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    resume_every=st.integers(1, 3),
    deaths=st.lists(st.tuples(st.sampled_from((*WHERES, "in the upload")), st.integers(1, STEPS)), max_size=3),
    fresh=st.booleans(),
)
def test_any_deaths(
    tmp_path_factory: pytest.TempPathFactory, resume_every: int, deaths: list[tuple[str, int]], *, fresh: bool
) -> None:
    folder: Path = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(folder)
        try:
            lives = Lives(world, monkeypatch, fresh=fresh, checkpoints={"resumeEvery": resume_every})
            for death in deaths:
                lives.live(death)
            result = lives.live()
            assert result is not None and result.exit_code == 0
            if lives.learners[-1].updates or len(lives.learners) == 1:
                lives.check()
        finally:
            world.close()
