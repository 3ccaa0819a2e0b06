"""Which curves a report draws, from the figures of the steps. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitestring_api.names import CLASS_SUCCEEDED, CLASSES
from kitestring_cli.inspection.summary import Summary, disagrees
from kitestring_cli.report.charts import Series, bar_chart, line_chart
from kitestring_trainer.agreement import AgreementBounds

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A picture with its words; `svg` is "" where there is nothing to draw, and `note` says why."""

    title: str
    note: str
    svg: str
    legend: tuple[str, ...] = ()
    """Names of the lines or layers, in the order of their colours; empty where there is one."""


def charts(summary: Summary, lines: Lines) -> list[Chart]:
    """All charts of which there is something to say."""
    return [chart for chart in _all(summary, lines) if chart.svg or chart.note]


def _all(summary: Summary, lines: Lines) -> Iterator[Chart]:
    yield _validation(summary)
    rewards = [(step, reward) for step, reward in summary.rewards.items() if reward is not None]
    yield Chart(
        "Reward in training",
        "mean over the counted rollouts of each step" if rewards else "no step has a reward",
        line_chart("reward per step", [Series("reward", rewards)], from_zero=True),
    )
    lengths = [
        Series("mean", _points(lines, "completion_tokens_per_rollout")),
        Series("longest", _points(lines, "completion_tokens_per_rollout_max"), dashed=True),
    ]
    drawn = line_chart("completion tokens per rollout", lengths, from_zero=True)
    yield Chart(
        "Response length", "completion tokens of a rollout, all its calls" if drawn else "", drawn, _names(lengths)
    )
    entropy = _points(lines, "entropy_nats")
    yield Chart(
        "Entropy",
        "of the policy's next token, nats" if entropy else "",
        line_chart("entropy", [Series("entropy", entropy)], from_zero=True),
    )
    yield from _agreement(summary, lines)
    yield _failures(summary, lines)
    yield _times(lines)


def _validation(summary: Summary) -> Chart:
    series = [
        Series(mode.removeprefix("validation-"), [(r.step, r.reward) for r in results if r.reward is not None])
        for mode in ("validation-sampled", "validation-greedy")
        if (results := summary.validations(mode))
    ]
    note = "mean reward over all validation tasks" if series else "nothing was validated"
    return Chart("Validation", note, line_chart("validation reward", series, from_zero=True), _names(series))


def _agreement(summary: Summary, lines: Lines) -> Iterator[Chart]:
    bounds = AgreementBounds()
    kl, correlation = _points(lines, "agreement_kl_k3_nats"), _points(lines, "agreement_correlation")
    verdict = "outside in some steps" if disagrees(summary) else "inside throughout"
    yield Chart(
        "KL of sampler and trainer",
        f"nats per token; bound {bounds.kl_nats:g}, {verdict}" if kl else "",
        line_chart("KL of sampler and trainer", [Series("KL", kl)], from_zero=True),
    )
    apart = [(step, 1 - value) for step, value in correlation]
    yield Chart(
        "1 − correlation of sampler and trainer",
        f"of the probabilities of sampled tokens; bound {1 - bounds.correlation:g}" if apart else "",
        line_chart("1 − correlation", [Series("1 − correlation", apart)], from_zero=True),
    )


def _failures(summary: Summary, lines: Lines) -> Chart:
    failing = [klass for klass in CLASSES if klass != CLASS_SUCCEEDED and summary.rollouts.get(klass)]
    title = "Rollouts that failed"
    if not failing:
        return Chart(title, "none: every rollout succeeded" if summary.rollouts else "", "")
    layers = {klass: [(line.get("rollouts_by_class") or {}).get(klass, 0) for line in lines] for klass in failing}
    svg = bar_chart("failed rollouts per step by class", _steps(lines), layers)
    return Chart(title, "by failure class, per step", svg, tuple(failing))


def _times(lines: Lines) -> Chart:
    phases = list(dict.fromkeys(phase for line in lines for phase in line.get("seconds") or {}))
    totals = {phase: sum((line.get("seconds") or {}).get(phase, 0.0) for line in lines) for phase in phases}
    share = 0.005 * sum(totals.values())
    shown = [phase for phase in phases if totals[phase] > share]
    layers = {phase: [(line.get("seconds") or {}).get(phase, 0.0) for line in lines] for phase in shown}
    svg = bar_chart("seconds per step by phase", _steps(lines), layers) if layers else ""
    return Chart("Time", "wall seconds of each step by phase" if svg else "", svg, tuple(shown))


def _steps(lines: Lines) -> list[int]:
    return [line["step"] for line in lines]


def _points(lines: Lines, key: str) -> list[tuple[float, float]]:
    """(step, value) where there is a value."""
    return [(line["step"], line[key]) for line in lines if isinstance(line.get(key), int | float)]


def _names(series: Sequence[Series]) -> tuple[str, ...]:
    drawn = tuple(one.name for one in series if one.points)
    return drawn if len(drawn) > 1 else ()
