"""The traces of one plan: a look into the stretch of time in which its rollouts ran, not into the whole run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import PREFIX_TRACES
from kitestring_cli.inspection.records import RunRecords
from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_rollout.storage import ObjectInfo, ObjectStore
from kitestring_rollout.traces.attempts import LostAttempt, ProvenAttempt
from kitestring_rollout.traces.codec import PayloadCorrupt
from kitestring_rollout.traces.object_keys import key_time
from kitestring_rollout.traces.reader import TraceReader, read_attempts
from kitestring_rollout.traces.records import CallRecord
from kitestring_trainer.commits import CommittedRollout, StepCommit

# Every object of which something is left out gets a line in the reader's log; here the sum of them is a note.
logging.getLogger(TraceReader.__module__).addHandler(logging.NullHandler())

MARGIN_SECONDS = 2.0
"""How far the clock that names trace objects may be from the trainer's; what lies further off is looked for by name."""


@dataclass
class PlanAttempts:
    """Attempts at the rollouts of one plan. A lost one is not provably complete: to look at, nothing else."""

    proven: dict[str, ProvenAttempt] = field(default_factory=dict)
    lost: dict[str, LostAttempt] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, attempt: ProvenAttempt | LostAttempt) -> None:
        if isinstance(attempt, ProvenAttempt):
            self.proven[attempt.attempt] = attempt
        else:
            self.lost[attempt.attempt] = attempt


def plan_attempts(
    records: RunRecords,
    mode: Mode,
    step: int,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    contents: bool,
) -> PlanAttempts:
    """Every attempt at the rollouts of the plan that are `wanted` (by rollout id). Memory follows the plan's traces.

    Raises UserMistakeError.
    """
    plan, commit = records.plan(mode, step), records.commit(mode, step)
    found = PlanAttempts()
    if plan is None:
        return found
    planned = frozenset(rollout for rollout in plan[0].rollouts if wanted(rollout))
    until = commit.unix_time + MARGIN_SECONDS if commit is not None else math.inf
    store: ObjectStore = _Until(records.store, until)
    with records.reading():
        reader = TraceReader(store, since=plan[1] - MARGIN_SECONDS, grace_seconds=math.inf, contents=contents)
        for decided in reader.poll():
            if _rollout(decided) in planned:
                found.add(decided)
        for undecided in reader.undecided():
            if _rollout(undecided) in planned:
                found.add(undecided)
        found.notes.extend(_left_out(reader))
        missing = _committed(commit, planned) - found.proven.keys()
        if missing:
            for decided in read_attempts(records.store, missing, contents=contents):
                found.lost.pop(decided.attempt, None)
                found.add(decided)
    return found


def proven_as_committed(rollout: CommittedRollout, attempts: PlanAttempts) -> ProvenAttempt | None:
    """The attempt by which the rollout counts, if its trace is still the one that was committed."""
    attempt = attempts.proven.get(rollout.attempt or "")
    if attempt is None or (attempt.end.n_calls, attempt.end.digest) != (rollout.n_calls, rollout.digest):
        return None
    return attempt


def calls_of(attempt: ProvenAttempt | LostAttempt) -> tuple[CallRecord, ...]:
    """Raises UserMistakeError when the trace is damaged."""
    try:
        return attempt.calls()
    except PayloadCorrupt as error:
        raise UserMistakeError(f"the trace of attempt {attempt.attempt} is damaged: {error}") from error


def require_traces(records: RunRecords) -> None:
    """Raises UserMistakeError for a run without any."""
    if not records.has_traces():
        raise UserMistakeError(
            f"{records.folder.root}: the run has no traces below {PREFIX_TRACES}; no agent called a model, or they "
            "were removed"
        )


def _left_out(reader: TraceReader) -> Iterator[str]:
    """What the reader could not make sense of."""
    counts = reader.counts
    if counts.unreadable_objects:
        yield f"{counts.unreadable_objects} trace objects cannot be read and were left out"
    if counts.corrupt_spans:
        yield f"{counts.corrupt_spans} spans are not what their hashes say and were left out"


def _committed(commit: StepCommit | None, planned: frozenset[str]) -> set[str]:
    if commit is None:
        return set()
    return {r.attempt for r in commit.rollouts if r.rollout in planned and r.attempt is not None and r.digest}


def _rollout(attempt: ProvenAttempt | LostAttempt) -> str | None:
    """Whose attempt it is; None where nothing that can be read says so."""
    if attempt.end is not None:
        return attempt.end.rollout
    try:
        calls = attempt.calls()
    except PayloadCorrupt:
        return None
    return calls[0].rollout if calls else None


class _Until:
    """An `ObjectStore` whose listings end where trace objects become newer than `until` (unix seconds)."""

    def __init__(self, store: ObjectStore, until: float) -> None:
        self._store = store
        self._until = until
        self.get = store.get
        self.put = store.put
        self.get_file = store.get_file
        self.put_file = store.put_file
        self.exists = store.exists
        self.delete = store.delete

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        for info in self._store.list(prefix, start_after):
            moment = key_time(info.key)
            if moment is not None and moment > self._until:
                return
            yield info
