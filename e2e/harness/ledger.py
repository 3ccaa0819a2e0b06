"""What a run wrote down in object storage: plans, commits and traces, as they lie there."""

from __future__ import annotations

import json
from typing import Any

from e2e.harness.api import Object
from kitestring_api import names
from kitestring_operator.identity import run_id
from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.reader import read_attempts
from kitestring_trainer.ledger import COMMITS, INCARNATIONS, PLANS


class Ledger:
    """The records of one run. `store` holds those of all runs."""

    def __init__(self, store: ObjectStore, run: Object) -> None:
        self._store = store
        self._prefix = run_id(run["metadata"]["name"], run["metadata"]["uid"]) + "/"

    def keys(self, prefix: str = "") -> list[str]:
        """Keys below the run's prefix that begin so."""
        return [info.key.removeprefix(self._prefix) for info in self._store.list(self._prefix + prefix)]

    def plan(self, step: int) -> list[str]:
        """The rollouts that a training step planned."""
        groups = self._read(f"{PLANS}t{step:06d}.json")["groups"]
        return [rollout for group in groups for rollout in group["rollouts"]]

    def commit(self, step: int) -> list[dict[str, Any]]:
        """What became of each rollout of a training step."""
        rollouts: list[dict[str, Any]] = self._read(f"{COMMITS}t{step:06d}.json")["rollouts"]
        return rollouts

    def resumed_steps(self) -> list[int]:
        """After which step each start of the trainer went on, the first one first."""
        return [self._read(key)["resumed_step"] for key in sorted(self.keys(INCARNATIONS))]

    def attempts(self) -> dict[str, ProvenAttempt]:
        """The attempts that storage proves to be complete, by id."""
        found = read_attempts(self._store, prefix=self._prefix + names.PREFIX_TRACES)
        return {one.attempt: one for one in found if isinstance(one, ProvenAttempt)}

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(self._prefix + key))
