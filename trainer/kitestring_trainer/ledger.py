"""The run's durable records below `state/` in object storage: incarnations, plans, commits, samples.

While the store is away everything here waits and tries again: an outage delays a run, it does not end it. One that has
never answered is another matter: its address may be wrong, and whoever wrote it wants to hear of that soon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar

import orjson
import zstandard

from kitestring_api.names import PREFIX_STATE, REASON_STORAGE_UNAVAILABLE
from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_rollout.storage import ObjectExists, ObjectMissing, ObjectStore, StoreRefused, StoreUnavailable
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.errors import ReplacedError, RunFailedError, RunStoppedError, UserMistakeError
from kitestring_trainer.incarnations import Incarnation
from kitestring_trainer.plan import LETTERS, StepPlan, plan_name
from kitestring_trainer.samples.batches import SampleRecord

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

PLANS = PREFIX_STATE + "plans/"
COMMITS = PREFIX_STATE + "commits/"
SUPERSEDED = PREFIX_STATE + "superseded/"
INCARNATIONS = PREFIX_STATE + "incarnations/"
SAMPLES = PREFIX_STATE + "samples/"


class Ledger:
    """Reads and writes the records of one run. Every method may raise RunStoppedError once `stop` is set, and
    RunFailedError when the store stays away for `patience_seconds`, or `first_answer_seconds` as long as it has not
    answered once; UserMistakeError when it refuses before `begin`. `place`: where its user says which store it is.

    Once another trainer of the run has begun, this one writes no plan and no commit any more: ReplacedError.
    """

    def __init__(
        self,
        store: ObjectStore,
        stop: threading.Event,
        *,
        patience_seconds: float = 900.0,
        first_answer_seconds: float = 900.0,
        place: str = "spec.storage",
    ) -> None:
        self._store = store
        self._stop = stop
        self._patience = patience_seconds
        self._first_answer = first_answer_seconds
        self._place = place
        self._has_answered = False
        self._own = 0
        """Number of the incarnation that writes; 0: it has not begun."""

    # --- incarnations ---

    def incarnations(self) -> list[Incarnation]:
        return [Incarnation.from_json(self._read(key)) for key in self._keys(INCARNATIONS)]

    def begin(self, incarnation: Incarnation) -> None:
        """Write the incarnation down. Raises ObjectExists when another process of this run is doing the same."""
        self._put_new(f"{INCARNATIONS}{incarnation.number:06d}.json", _json(incarnation.to_json()))
        self._own = incarnation.number

    def check_own(self) -> None:
        """A trainer that was cut off, and replaced meanwhile, must not write over what its successor writes.

        Raises ReplacedError.
        """
        newest = max((int(key.removeprefix(INCARNATIONS)[:6]) for key in self._keys(INCARNATIONS)), default=0)
        if newest > self._own:
            raise ReplacedError(f"incarnation {newest} of the run has begun, this is {self._own}")

    # --- plans and commits ---

    def plan(self, mode: Mode, step: int) -> tuple[StepPlan, float] | None:
        """The plan and the unix time at which it was first written; None when there is none."""
        data = self._read_or_none(f"{PLANS}{plan_name(mode, step)}.json")
        return None if data is None else (StepPlan.from_json(data), float(data["unix_time"]))

    def put_plan(self, plan: StepPlan) -> None:
        """Write the plan of a step that has none."""
        self.check_own()
        try:
            self._put_new(f"{PLANS}{plan.name}.json", _json(plan.to_json() | {"unix_time": time.time()}))
        except ObjectExists as error:
            raise ReplacedError(f"another trainer has just written the plan {plan.name}") from error

    def commit(self, mode: Mode, step: int) -> StepCommit | None:
        data = self._read_or_none(f"{COMMITS}{plan_name(mode, step)}.json")
        return None if data is None else StepCommit.from_json(data)

    def put_commit(self, commit: StepCommit, *, replaces: StepCommit | None = None) -> None:
        """Write the commit; what it replaces is kept below `state/superseded/`.

        A commit that a predecessor wrote since, although it was replaced already, is replaced as well.
        """
        self.check_own()
        key = f"{COMMITS}{commit.name}.json"
        if replaces is None:
            try:
                self._put_new(key, _json(commit.to_json()))
                return
            except ObjectExists as error:
                replaces = StepCommit.from_json(self._read(key))
                if replaces.incarnation >= commit.incarnation:
                    raise ReplacedError(
                        f"incarnation {replaces.incarnation} has just committed {commit.name}"
                    ) from error
        self._put(f"{SUPERSEDED}{replaces.name}.{replaces.incarnation:06d}.json", _json(replaces.to_json()))
        self._put(key, _json(commit.to_json()))

    def commits(self, mode: Mode) -> list[StepCommit]:
        """All commits of a mode in the order of their steps."""
        return [StepCommit.from_json(self._read(key)) for key in self._keys(COMMITS + LETTERS[mode])]

    def last_committed_step(self) -> int:
        """The last training step up to which all are committed; 0 when none is."""
        names = set(self._keys(COMMITS + LETTERS["train"]))
        step = 0
        while f"{COMMITS}{plan_name('train', step + 1)}.json" in names:
            step += 1
        return step

    def put_samples(self, step: int, records: Iterable[SampleRecord]) -> None:
        """What became of each transition of the step, one JSON object per line."""
        lines = b"".join(orjson.dumps(asdict(record)) + b"\n" for record in records)
        self._put(f"{SAMPLES}{plan_name('train', step)}.jsonl.zst", zstandard.compress(lines))

    # --- the store, whenever it is there ---

    def _keys(self, prefix: str) -> list[str]:
        return self.persist(lambda: [info.key for info in self._store.list(prefix)])

    def _read(self, key: str) -> dict[str, Any]:
        data: dict[str, Any] = orjson.loads(self.persist(lambda: self._store.get(key)))
        return data

    def _read_or_none(self, key: str) -> dict[str, Any] | None:
        try:
            return self._read(key)
        except ObjectMissing:
            return None

    def _put(self, key: str, data: bytes) -> None:
        self.persist(lambda: self._store.put(key, data))

    def _put_new(self, key: str, data: bytes) -> None:
        """Raises ObjectExists when there is another object; its own may be there after a try that seemed to fail."""
        try:
            self.persist(lambda: self._store.put(key, data, if_absent=True))
        except ObjectExists:
            if self.persist(lambda: self._store.get(key)) != data:
                raise

    def persist(self, action: Callable[[], Answer]) -> Answer:
        """Do what needs the store as soon as the store lets it; `action` may be called again after StoreUnavailable."""
        since = time.monotonic()
        pause = 0.1
        while True:
            try:
                answer = action()
                self._has_answered = True
                return answer
            except StoreUnavailable as error:
                if isinstance(error, StoreRefused) and not self._own:
                    raise UserMistakeError(f"object storage ({self._place}) refuses this run: {error}") from error
                self._check_patience(time.monotonic() - since, error)
                logger.warning("object storage is away, waiting: %s", error)
                if self._stop.wait(pause):
                    raise RunStoppedError("stopped while object storage was away") from error
                pause = min(2.0, pause * 2)

    def _check_patience(self, away: float, error: StoreUnavailable) -> None:
        """`away`: seconds. Raises RunFailedError when that is too long."""
        if away <= (self._patience if self._has_answered else self._first_answer):
            return
        said = f"away for {away:.0f} s: {error}"
        if not self._has_answered:
            said = (
                f"object storage ({self._place}) has not answered once in {away:.0f} s: {error}; check its address, "
                "and that this process may reach it"
            )
        raise RunFailedError(REASON_STORAGE_UNAVAILABLE, said, restart_helps=True) from error


def _json(data: dict[str, Any]) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_INDENT_2)
