"""The run's records when another process of the trainer writes as well, and when storage answers late or never."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kitestring_rollout.storage import DirectoryStore, ObjectExists, ObjectStore, StoreRefused, StoreUnavailable
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.errors import RunFailedError, UserMistakeError
from kitestring_trainer.incarnations import Incarnation
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.plan import plan_training_step

FIRST, SECOND = (Incarnation(number, float(number), 0) for number in (1, 2))
PLAN = plan_training_step(seed=0, step=1, n_tasks=4, tasks_per_step=2, group_size=2)
COMMIT = StepCommit("run", "train", 1, 1, "1.0", 0.0, ())


class LateStore(DirectoryStore):
    """What is put is there, but the answer gets lost."""

    late = 0

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        if self.late:
            self.late -= 1
            raise StoreUnavailable("timed out")


def begun(store: ObjectStore, incarnation: Incarnation) -> Ledger:
    ledger = Ledger(store, threading.Event())
    ledger.begin(incarnation)
    return ledger


@pytest.fixture
def store(tmp_path: Path) -> LateStore:
    return LateStore(tmp_path / "store")


def test_of_two_that_begin_at_once_one_succeeds(store: LateStore) -> None:
    begun(store, FIRST)
    with pytest.raises(ObjectExists):
        begun(store, replace(FIRST, unix_time=1.5))


def test_what_was_written_although_the_answer_was_lost_is_known_again(store: LateStore) -> None:
    store.late = 1
    ledger = begun(store, FIRST)
    assert ledger.incarnations() == [FIRST]
    store.late = 1
    ledger.put_plan(PLAN)
    store.late = 1
    ledger.put_commit(COMMIT)
    assert store.late == 0
    assert ledger.commit("train", 1) == COMMIT


def test_a_trainer_that_was_replaced_writes_nothing_more(store: LateStore) -> None:
    zombie = begun(store, FIRST)
    zombie.put_plan(PLAN)
    begun(store, SECOND)
    writes: tuple[Callable[[], None], ...] = (
        lambda: zombie.put_plan(replace(PLAN, step=2)),
        lambda: zombie.put_commit(COMMIT),
        lambda: zombie.put_commit(COMMIT, replaces=COMMIT),
    )
    for write in writes:
        with pytest.raises(RunFailedError, match="incarnation 2 of the run has begun, this is 1") as caught:
            write()
        assert caught.value.reason == "AlreadyReplaced"
    assert sorted(info.key.removeprefix("state/") for info in store.list("state/")) == [
        "incarnations/000001.json",
        "incarnations/000002.json",
        "plans/t000001.json",
    ]


def test_a_commit_that_a_predecessor_slipped_in_is_superseded(store: LateStore) -> None:
    zombie = begun(store, FIRST)
    zombie.put_commit(COMMIT)
    ledger = begun(store, SECOND)
    ledger.put_commit(replace(COMMIT, incarnation=2, policy_version="2.0"))
    found = ledger.commit("train", 1)
    assert found is not None and found.incarnation == 2
    assert store.exists("state/superseded/t000001.000001.json")


def test_a_commit_of_a_successor_is_never_written_over(store: LateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The successor begins after the look at incarnations and before the write."""
    zombie = begun(store, FIRST)
    theirs = replace(COMMIT, incarnation=2, policy_version="2.0")
    monkeypatch.setattr(zombie, "check_own", lambda: None)
    begun(store, SECOND).put_commit(theirs)
    with pytest.raises(RunFailedError, match="incarnation 2 has just committed t000001"):
        zombie.put_commit(COMMIT)
    assert zombie.commit("train", 1) == theirs


def away() -> None:
    raise StoreUnavailable("bucket b at nowhere.example: no such host")


def test_storage_that_never_answered_is_given_up_soon(store: LateStore) -> None:
    """Its address may be wrong."""
    ledger = Ledger(store, threading.Event(), first_answer_seconds=0.0, place="spec.storage")
    with pytest.raises(RunFailedError) as raised:
        ledger.persist(away)
    assert (raised.value.reason, raised.value.restart_helps) == ("StorageUnavailable", True)
    said = str(raised.value)
    assert said.startswith("object storage (spec.storage) has not answered once in 0 s: bucket b at nowhere.example: ")
    assert "check its address" in said


def test_storage_that_answered_once_is_waited_for(store: LateStore) -> None:
    outage = iter([True, True, False])

    def passing() -> str:
        if next(outage):
            away()
        return "there"

    ledger = Ledger(store, threading.Event(), patience_seconds=60.0, first_answer_seconds=0.0)
    assert ledger.incarnations() == []
    assert ledger.persist(passing) == "there"


def test_a_refusal_is_told_as_a_mistake_until_the_run_has_begun(store: LateStore) -> None:
    def refused() -> None:
        raise StoreRefused("bucket b at s3.example: AccessDenied: no; use other credentials")

    ledger = Ledger(store, threading.Event(), patience_seconds=0.0, place="defaultStorage of the installation")
    with pytest.raises(
        UserMistakeError, match=r"storage \(defaultStorage of the installation\) refuses this run: .*; use"
    ):
        ledger.persist(refused)
    ledger.begin(FIRST)
    with pytest.raises(RunFailedError, match="away for 0 s: bucket b"):
        ledger.persist(refused)
