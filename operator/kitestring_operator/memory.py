"""What is known of a run beside the cluster's own objects. All of it can be lost: it is asked for again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kitestring_operator.observed import WantedRollout
from kitestring_operator.run_report import RunReport


@dataclass(slots=True)
class TrainerMemory:
    """What the trainer of one Job said. Times are those of the event loop."""

    job_uid: str
    number: int = 1
    """N of RUN-trainer-N."""
    report: RunReport | None = None
    answered_at: float = 0.0
    step_at: float = 0.0
    """When the step that it reports was first seen."""
    longest_step: float | None = None
    wanted: tuple[WantedRollout, ...] = ()
    over: dict[tuple[str, int], float] = field(default_factory=dict)
    """Rollouts whose Job was deleted, by number of the attempt, and when."""
    unfit: dict[tuple[str, int], str] = field(default_factory=dict)
    """Of the rollouts that wait, those whose Job the API server refuses for what their task asks, and its words."""
    live: Mapping[str, Any] | None = None
    """What it was told by PUT /run/v1/live."""

    def answered(self, report: RunReport, now: float) -> bool:
        """Take in an answer. Whether it says anything new."""
        before = self.report
        if before is None or before.step != report.step:
            if before is not None and report.step == before.step + 1 and before.step > 0:
                self.longest_step = max(self.longest_step or 0.0, now - self.step_at)
            self.step_at = now
        changed = before is None or before != report
        self.report, self.answered_at = report, now
        return changed

    def asked_for(self, wanted: tuple[WantedRollout, ...], asked_at: float) -> bool:
        """Take in the rollouts that wait for an executor, as of a question at `asked_at`. Whether it says anything new.

        An answer that may be older than the end of a rollout's Job says nothing of that rollout.
        """
        self.over = {key: when for key, when in self.over.items() if when >= asked_at}
        known = tuple(entry for entry in wanted if (entry.rollout, entry.number) not in self.over)
        changed = known != self.wanted
        self.wanted = known
        waiting = {(entry.rollout, entry.number) for entry in wanted}
        self.unfit = {key: why for key, why in self.unfit.items() if key in waiting}
        return changed

    def has_executor(self, rollout: str, number: int) -> None:
        """A Job was made for the rollout: it waits no longer, until a later answer says so again."""
        self.wanted = tuple(entry for entry in self.wanted if (entry.rollout, entry.number) != (rollout, number))

    def has_lost_executor(self, rollout: str, number: int, now: float) -> None:
        """The Job of a rollout is deleted. One that never leased it has left it waiting in all answers until now."""
        self.over[rollout, number] = now
        self.has_executor(rollout, number)

    def status(self, now: float) -> dict[str, Any] | None:
        """The report with what the operator knows of the pace, as plain data."""
        if self.report is None:
            return None
        timed = {"since_step_seconds": now - self.step_at, "step_seconds": self.longest_step}
        return self.report.model_dump() | timed


@dataclass(slots=True)
class RunMemory:
    """What is remembered of one run."""

    uid: str
    trainer: TrainerMemory | None = None
    status_written_at: float | None = None
    refused: tuple[tuple[int, int], str] | None = None
    """Generations of run and pool for which the API server refused an object, and what it said. It is tried again after
    a resync: what refused it, such as a policy of the cluster, may have changed."""
    hindrance: str | None = None
    """What kept an object from being made when that was last tried; None: nothing."""
    log: tuple[str, str] | None = None
    """uid of a trainer Job that ended badly, and the last lines of its pod."""
    classes: Mapping[str, int] = field(default_factory=dict)
    """Committed rollouts by failure class, as its trainers last said them to this process."""
    queue_credential: str | None = None
    told_lost: set[tuple[str, int]] = field(default_factory=set)
    """Rollouts of which the queue was told that they are lost."""
