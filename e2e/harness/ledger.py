"""What a run wrote down in object storage, read as an independent checker would: plans, commits, how they agree."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from e2e.harness.api import Object
from kitestring_api.names import PREFIX_STATE
from kitestring_rollout.storage import ObjectStore

PLANS = PREFIX_STATE + "plans/"
COMMITS = PREFIX_STATE + "commits/"


class Ledger:
    """The records of one run, by the identity that it has in storage."""

    def __init__(self, store: ObjectStore, run: Object) -> None:
        metadata = run["metadata"]
        self._store = store
        self._prefix = f"{metadata['name']}-{metadata['uid'][:8]}/"

    def keys(self, prefix: str = "") -> list[str]:
        """Keys below the run's prefix."""
        return [info.key.removeprefix(self._prefix) for info in self._store.list(self._prefix + prefix)]

    def plan(self, step: int) -> list[str]:
        """The rollouts that a training step planned."""
        groups = self._read(f"{PLANS}t{step:06d}.json")["groups"]
        return [rollout for group in groups for rollout in group["rollouts"]]

    def commit(self, step: int) -> list[dict[str, Any]]:
        """What became of each rollout of a training step."""
        rollouts: list[dict[str, Any]] = self._read(f"{COMMITS}t{step:06d}.json")["rollouts"]
        return rollouts

    def classes(self, step: int) -> Counter[str]:
        """Rollouts of a training step by class."""
        return Counter(rollout["class"] for rollout in self.commit(step))

    def assert_counted_once(self, steps: int) -> None:
        """Every planned rollout of every step is in the commit of its step, once, and in no other; no attempt twice."""
        expected = [f"t{step:06d}.json" for step in range(1, steps + 1)]
        for prefix in (PLANS, COMMITS):
            found = [key.removeprefix(prefix) for key in self.keys(prefix)]
            assert [name for name in found if name.startswith("t")] == expected, f"{prefix}: {found}"
        for step in range(1, steps + 1):
            planned, committed = self.plan(step), [rollout["rollout"] for rollout in self.commit(step)]
            assert planned, f"step {step} planned nothing"
            assert sorted(planned) == sorted(committed), f"step {step}: planned {planned}, committed {committed}"
        every = [rollout for step in range(1, steps + 1) for rollout in self.commit(step)]
        for field in ("rollout", "attempt"):
            counts = Counter(rollout[field] for rollout in every if rollout[field] is not None)
            assert counts and max(counts.values()) == 1, f"a {field} counts more than once: {counts}"

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(self._prefix + key))
