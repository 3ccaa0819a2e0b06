"""From what a user types for ROLLOUT, or for an attempt, to the one that is meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kitestring_api.errors import UserMistakeError
from kitestring_cli.inspection.records import MODES, RunRecords
from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_trainer.plan import LETTERS

_PLAN = re.compile(r"(?P<letter>[a-z])(?P<step>\d{6})(-.*)?")
_SHOWN = 4
_DIGITS = 3
"""A longer number is part of an id."""
_COMPARED = 20_000
"""Ids that are compared with a misspelt one."""


@dataclass(frozen=True)
class PlannedRollout:
    mode: Mode
    step: int
    rollout: str


def find_rollout(records: RunRecords, text: str) -> PlannedRollout:
    """The rollout of that id, or the only one whose id contains `text`. Raises UserMistakeError."""
    match = _PLAN.fullmatch(text)
    mode = next((mode for mode in MODES if match and LETTERS[mode] == match["letter"]), None)
    if match and mode:
        of_plan = list(_planned(records, mode, [int(match["step"])]))
        begins = [planned for planned in of_plan if planned.rollout.startswith(text)]
        if begins:
            return _only(begins, text)
    contains: list[PlannedRollout] = []
    near: list[str] = []
    for planned in _all(records):
        if text in planned.rollout:
            contains.append(planned)
        if len(near) < _COMPARED:
            near.append(planned.rollout)
    if contains:
        return _only(contains, text)
    if not near:
        raise UserMistakeError(f"{text}: no such rollout; the run {records.name} has planned none yet")
    close = difflib.get_close_matches(text, near, n=1, cutoff=0.3)
    raise UserMistakeError(f"{text}: no such rollout in run {records.name}; nearest: {(close or near)[0]}")


def choose_attempt(attempts: Sequence[str], text: str) -> str:
    """The attempt that `text` names: its place from 1 in order of time, or part of its id. Raises UserMistakeError."""
    if text.isdecimal() and len(text) <= _DIGITS:
        found = [attempt for place, attempt in enumerate(attempts, start=1) if place == int(text)]
    else:
        found = [attempt for attempt in attempts if text in attempt]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{place} = {attempt}" for place, attempt in enumerate(attempts, start=1))
    raise UserMistakeError(f"--attempt {text}: {'several match' if found else 'no such attempt'}; known: {known}")


def _only(found: Sequence[PlannedRollout], text: str) -> PlannedRollout:
    exact = [planned for planned in found if planned.rollout == text]
    if exact or len(found) == 1:
        return (exact or found)[0]
    shown = ", ".join(planned.rollout for planned in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise UserMistakeError(f"{text}: {len(found)} rollouts match; give more of the id: {shown}{more}")


def _all(records: RunRecords) -> Iterator[PlannedRollout]:
    for mode in MODES:
        yield from _planned(records, mode, records.planned_steps(mode))


def _planned(records: RunRecords, mode: Mode, steps: Sequence[int]) -> Iterator[PlannedRollout]:
    for step in steps:
        found = records.plan(mode, step)
        if found is not None:
            yield from (PlannedRollout(mode, step, rollout) for rollout in found[0].rollouts)
