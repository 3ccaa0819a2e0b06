"""Mini-batches: whole rollouts dealt into the step's optimizer updates, each token weighted as in Eq. 16.

Loss of one update (arXiv 2608.17528, Eq. 16): 1/N · Σ_i 1/T_i · Σ_{rows of i} Σ_t loss_t, where N is the number of
counted rollouts of that mini-batch, those without spread in their group and those whose rows were dropped included,
and T_i the trained tokens of rollout i after drops. The weight 1/(N·T_i) travels with each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kitestring_trainer.learner import StepBatch, TrainingRow
from kitestring_trainer.samples.advantages import AdvantageKind, advantages
from kitestring_trainer.samples.credit import identical_credit
from kitestring_trainer.samples.rows import Row, RowLimits, merge_rows
from kitestring_trainer.samples.transitions import Transition

EXCLUDED_GROUP = "group has {found} counted rollouts, minGroupSize is {limit}"


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A counted rollout: complete, with a reward."""

    rollout: str
    group: str
    reward: float
    transitions: tuple[Transition, ...]


@dataclass(frozen=True, slots=True)
class SampleRules:
    """What of the TrainingRun decides on samples."""

    advantage: AdvantageKind
    normalize_by_std: bool
    min_group_size: int
    limits: RowLimits
    updates: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """What became of one transition; one line of `state/samples`."""

    rollout: str
    attempt: str
    seq: int
    choice: int
    row: int | None
    """Index of the row within its rollout; None when the transition is in no row."""
    credit: float
    advantage: float | None
    loss_weight: float
    """1/(N·T_i) of each of its tokens; 0.0 where it was not trained on."""
    mini_batch: int | None
    excluded: str | None


@dataclass(frozen=True, slots=True)
class _Prepared:
    rollout: ScoredRollout
    rows: list[Row]
    advantage: float
    trained_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trained_tokens", sum(row.trained_tokens for row in self.rows))


@dataclass(frozen=True, slots=True)
class Samples:
    batch: StepBatch
    records: tuple[SampleRecord, ...]
    skipped_groups: tuple[str, ...]
    rows_dropped: int
    rows_per_rollout: float
    """Mean over the rollouts that gave a row; above 1.1 the agent's contexts do not extend each other by ids."""


def make_samples(step: int, policy_version: str, rollouts: Sequence[ScoredRollout], rules: SampleRules) -> Samples:
    """The update of a step from its counted rollouts. Deterministic: the same rollouts give the same batch.

    `policy_version` is the version being trained; tokens sampled from another one are marked for the correlation check.
    """
    groups = _by_group(rollouts)
    skipped = tuple(group for group, members in groups.items() if len(members) < rules.min_group_size)
    kept = {group: members for group, members in groups.items() if group not in skipped}
    rewards = {group: np.array([member.reward for member in members]) for group, members in kept.items()}
    values = advantages(rewards, rules.advantage, normalize_by_std=rules.normalize_by_std)
    prepared = [
        _Prepared(member, merge_rows(member.transitions, rules.limits), float(value))
        for group, members in kept.items()
        for member, value in zip(members, values[group], strict=True)
    ]
    rows: list[TrainingRow] = []
    records: list[SampleRecord] = []
    for index, cell in enumerate(deal(prepared, rules.updates)):
        for item in cell:
            weight = 1.0 / (len(cell) * item.trained_tokens) if item.trained_tokens else 0.0
            rows.extend(_training_row(item, row, index, weight, policy_version) for row in item.rows if not row.dropped)
            records.extend(_records(item, index, weight))
    for group in skipped:
        reason = EXCLUDED_GROUP.format(found=len(groups[group]), limit=rules.min_group_size)
        records.extend(record for member in groups[group] for record in _skipped_records(member, reason))
    with_rows = [item for item in prepared if item.rows]
    return Samples(
        batch=StepBatch(step=step, rows=tuple(rows), updates=rules.updates),
        records=tuple(records),
        skipped_groups=skipped,
        rows_dropped=sum(row.dropped is not None for item in prepared for row in item.rows),
        rows_per_rollout=sum(len(item.rows) for item in with_rows) / len(with_rows) if with_rows else 0.0,
    )


def deal(rollouts: Sequence[_Prepared], updates: int) -> list[list[_Prepared]]:
    """Whole rollouts into `updates` cells of equal size (±1) and nearly equal trained tokens.

    Longest first, back and forth over the cells; ties keep the order of the plan, so the deal is reproducible.
    """
    cells: list[list[_Prepared]] = [[] for _ in range(updates)]
    order = sorted(range(len(rollouts)), key=lambda i: (-rollouts[i].trained_tokens, i))
    for position, index in enumerate(order):
        lap, place = divmod(position, updates)
        cells[place if lap % 2 == 0 else updates - 1 - place].append(rollouts[index])
    return cells


def _by_group(rollouts: Sequence[ScoredRollout]) -> Mapping[str, list[ScoredRollout]]:
    groups: dict[str, list[ScoredRollout]] = {}
    for rollout in sorted(rollouts, key=lambda r: (r.group, r.rollout)):
        groups.setdefault(rollout.group, []).append(rollout)
    return groups


def _training_row(item: _Prepared, row: Row, mini_batch: int, weight: float, policy_version: str) -> TrainingRow:
    current = np.zeros(len(row.response_ids), np.bool_)
    for span in row.versions:
        if span.version == policy_version:
            current[span.start : span.end] = True
    return TrainingRow(
        rollout=item.rollout.rollout,
        group=item.rollout.group,
        mini_batch=mini_batch,
        prompt_ids=row.prompt_ids.astype(np.int64),
        response_ids=row.response_ids.astype(np.int64),
        response_mask=row.response_mask.astype(np.int64),
        rollout_logprobs=row.logprobs,
        advantage=item.advantage,
        loss_weight=weight,
        current_version=current,
    )


def _records(item: _Prepared, mini_batch: int, weight: float) -> list[SampleRecord]:
    placed = {key: (index, row) for index, row in enumerate(item.rows) for key in row.transitions}
    credits = identical_credit(item.rollout.transitions, item.rollout.reward)
    records = []
    for transition, credit in zip(item.rollout.transitions, credits, strict=True):
        index, row = placed.get((transition.seq, transition.choice), (None, None))
        excluded = transition.excluded or (row.dropped if row is not None else None)
        trained = row is not None and excluded is None
        records.append(
            SampleRecord(
                rollout=transition.rollout,
                attempt=transition.attempt,
                seq=transition.seq,
                choice=transition.choice,
                row=index,
                credit=credit,
                advantage=item.advantage,
                loss_weight=weight if trained else 0.0,
                mini_batch=mini_batch if trained else None,
                excluded=excluded,
            )
        )
    return records


def _skipped_records(rollout: ScoredRollout, reason: str) -> list[SampleRecord]:
    credits = identical_credit(rollout.transitions, rollout.reward)
    return [
        SampleRecord(t.rollout, t.attempt, t.seq, t.choice, None, credit, None, 0.0, None, t.excluded or reason)
        for t, credit in zip(rollout.transitions, credits, strict=True)
    ]
