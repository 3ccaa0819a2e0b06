"""The figures of a run in one object: what `kitestring inspect` shows, and what a report begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kitestring_api.names import CLASS_SUCCEEDED, MODE_TRAIN, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED
from kitestring_cli.inspection.records import RunRecords
from kitestring_rollout.protocol.run_status import ValidationResult
from kitestring_trainer.agreement import AgreementBounds
from kitestring_trainer.commits import CommittedRollout, StepCommit

RUNNING = "Running"
"""Phase of a run whose trainer answers."""
UNFINISHED = "Unfinished"
"""Phase of a run that left no result and whose trainer does not answer: killed, or ended with its machine."""


@dataclass(frozen=True)
class Loss:
    """Rollouts that do not count, for one reason. `example` is one of them."""

    klass: str
    reason: str
    count: int
    example: str


@dataclass
class Commits:
    """What the commits of the training steps add up to."""

    steps: int = 0
    planned: int = 0
    counted: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    losses: dict[tuple[str, str], Loss] = field(default_factory=dict)
    failures: dict[tuple[str, str], Loss] = field(default_factory=dict)
    """Rollouts that count although they did not succeed."""
    retried: int = 0
    superseded: int = 0
    skipped: list[int] = field(default_factory=list)
    rewards: dict[int, float | None] = field(default_factory=dict)
    worst: CommittedRollout | None = None
    """Of the last step: the counted rollouts with the lowest and the highest reward."""
    best: CommittedRollout | None = None

    def add(self, commit: StepCommit) -> None:
        self.steps += 1
        self.planned += len(commit.rollouts)
        self.counted += len(commit.counted)
        self.classes += commit.classes
        self.superseded += len(commit.superseded)
        for rollout in commit.rollouts:
            self.retried += max(0, rollout.tries - 1)
            if rollout.excluded is not None:
                _note(self.losses, rollout, rollout.reason or rollout.excluded)
            elif rollout.klass != CLASS_SUCCEEDED:
                _note(self.failures, rollout, rollout.reason or "no reason given")
        scored = sorted(commit.counted, key=lambda rollout: rollout.reward or 0.0)
        rewards = [rollout.reward for rollout in scored if rollout.reward is not None]
        self.rewards[commit.step] = sum(rewards) / len(rewards) if rewards else None
        if scored:
            self.worst, self.best = scored[0], scored[-1]
        else:
            self.skipped.append(commit.step)


def _note(losses: dict[tuple[str, str], Loss], rollout: CommittedRollout, reason: str) -> None:
    known = losses.get((rollout.klass, reason))
    count, example = (known.count, known.example) if known else (0, rollout.rollout)
    losses[rollout.klass, reason] = Loss(rollout.klass, reason, count + 1, example)


@dataclass(frozen=True)
class Summary:
    """Rewards are means; `seconds` are wall seconds of all steps by phase; tokens are those of training rollouts."""

    run: str
    folder: str
    phase: str
    reason: str | None
    message: str | None
    backend: str
    steps: int
    steps_planned: int
    starts: int
    validation: tuple[ValidationResult, ...]
    rewards: Mapping[int, float | None]
    rollouts: Mapping[str, int]
    counted: int
    excluded: tuple[Loss, ...]
    failures: tuple[Loss, ...]
    retried: int
    superseded: int
    skipped_steps: tuple[int, ...]
    correlation_min: float | None
    kl_max_nats: float | None
    degraded_steps: tuple[int, ...]
    seconds: Mapping[str, float]
    wall_seconds: float | None
    prompt_tokens: int
    completion_tokens: int
    trained_tokens: int
    rows_per_rollout: float | None
    replies_cut_share: float | None
    calls_nonconforming: int
    spread_share: float | None
    """Of the counted groups, those whose rollouts did not all get the same reward: only they teach anything."""
    checkpoint: str | None
    report: str | None
    worst: str | None
    best: str | None
    notes: tuple[str, ...]

    def validations(self, mode: str) -> list[ValidationResult]:
        """Of one mode, in the order of the steps."""
        return [result for result in self.validation if result.mode == mode]

    @property
    def before(self) -> dict[str, ValidationResult]:
        """By mode: what the policy was worth before training."""
        return {result.mode: result for result in self.validation if result.step == 0}

    @property
    def after(self) -> dict[str, ValidationResult]:
        """By mode: the last validation that came after a step."""
        return {result.mode: result for result in self.validation if result.step > 0}

    def as_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["validation"] = [result.model_dump(mode="json") for result in self.validation]
        for name, results in (("validation_before", self.before), ("validation_after", self.after)):
            data[name] = {
                mode.removeprefix("validation-"): result.model_dump(mode="json", exclude={"mode"})
                for mode, result in results.items()
            }
        data["rewards"] = [{"step": step, "reward": reward} for step, reward in self.rewards.items()]
        return data


def summarise(records: RunRecords, phase_now: str | None = None) -> Summary:
    """`phase_now` is what the trainer answers, None when it does not. Raises UserMistakeError."""
    commits = Commits()
    for commit in records.commits(MODE_TRAIN):
        commits.add(commit)
    validation = sorted(
        (
            commit.validation
            for mode in (MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED)
            for commit in records.commits(mode)
            if commit.validation is not None
        ),
        key=lambda result: (result.step, result.mode),
    )
    lines, result = records.figures.lines, records.result
    over = phase_now is None
    report = records.folder.report
    return Summary(
        run=records.name,
        folder=str(records.folder.root),
        phase=(result.get("phase") or UNFINISHED) if over else f"{RUNNING} ({phase_now})",
        reason=result.get("reason") if over else None,
        message=result.get("message") if over else None,
        backend=records.config.spec.trainer.backend,
        steps=commits.steps,
        steps_planned=records.config.spec.steps,
        starts=records.starts(),
        validation=tuple(validation),
        rewards=commits.rewards,
        rollouts=dict(commits.classes.most_common()),
        counted=commits.counted,
        excluded=_most_common(commits.losses),
        failures=_most_common(commits.failures),
        retried=commits.retried,
        superseded=commits.superseded,
        skipped_steps=tuple(commits.skipped),
        correlation_min=min(_all(lines, "agreement_correlation"), default=None),
        kl_max_nats=max(_all(lines, "agreement_kl_k3_nats"), default=None),
        degraded_steps=tuple(line["step"] for line in lines if line.get("degraded")),
        seconds=seconds_by_phase(lines),
        wall_seconds=result.get("wall_seconds"),
        prompt_tokens=int(sum(_all(lines, "prompt_tokens"))),
        completion_tokens=int(sum(_all(lines, "completion_tokens"))),
        trained_tokens=int(sum(_all(lines, "trained_tokens"))),
        rows_per_rollout=_mean(_all(lines, "rows_per_rollout")),
        replies_cut_share=_mean(_all(lines, "replies_cut_share")),
        calls_nonconforming=int(sum(_all(lines, "calls_nonconforming"))),
        spread_share=_spread_share(lines),
        checkpoint=result.get("checkpoint"),
        report=str(report) if report.is_file() else None,
        worst=commits.worst.rollout if commits.worst else None,
        best=commits.best.rollout if commits.best else None,
        notes=records.figures.notes,
    )


def disagrees(summary: Summary) -> bool:
    """Whether policy servers and trainer ever disagreed about the probabilities of sampled tokens."""
    bounds = AgreementBounds()
    return (summary.kl_max_nats is not None and summary.kl_max_nats > bounds.kl_nats) or bool(summary.degraded_steps)


def seconds_by_phase(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Wall seconds of all steps by phase, in the order in which phases first appear."""
    total: dict[str, float] = {}
    for line in lines:
        for phase, seconds in (line.get("seconds") or {}).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def _most_common(losses: Mapping[tuple[str, str], Loss]) -> tuple[Loss, ...]:
    return tuple(sorted(losses.values(), key=lambda loss: (-loss.count, loss.klass, loss.reason)))


def _all(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values that are there: a figure that a step could not have is null."""
    return [line[key] for line in lines if isinstance(line.get(key), int | float)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _spread_share(lines: Sequence[Mapping[str, Any]]) -> float | None:
    counted, without = sum(_all(lines, "groups_counted")), sum(_all(lines, "groups_without_spread"))
    return 1 - without / counted if counted else None
