"""What to look at next in a run, from its figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kitestring_cli.inspection.summary import UNFINISHED, Summary, disagrees

FEW_ROWS = 1.1
"""Rows of a rollout above which contexts are not extended as a rule."""
CUT_SHARE = 0.05
SPREAD_SHARE = 0.3
MIN_GROUPS_STEPS = 2
"""Steps from which the share of groups with spread says something."""


@dataclass(frozen=True)
class Advice:
    """A sentence, and the command or the file that shows more, if there is one."""

    text: str
    command: str | None = None


def advise(summary: Summary) -> list[Advice]:
    """The most urgent first; never empty."""
    return list(_all(summary))


def _all(summary: Summary) -> Iterator[Advice]:
    folder = shown_folder(summary.folder)
    if summary.phase in ("Failed", UNFINISHED):
        resumable = "it goes on from its last state" if summary.steps else "nothing was committed yet"
        what = "the run failed" if summary.phase == "Failed" else "the run ended without a word"
        yield Advice(f"{what}; its trainer's log says more", f"tail -n 40 {folder}/logs/trainer.log")
        yield Advice(f"start it again: {resumable}", f"kitestring run --resume {folder}")
    yield from _losses(summary, folder)
    if disagrees(summary):
        steps = ", ".join(map(str, summary.degraded_steps)) or "some"
        yield Advice(
            f"policy servers and trainer disagree about probabilities (steps {steps}): no best checkpoint is marked "
            "there; compare dtype, chat template and sampling of the two sides"
        )
    yield from _learning(summary)
    if summary.worst is not None:
        yield Advice("read the rollout with the lowest reward of the last step", _show(folder, summary.worst))
    if summary.best is not None and summary.best != summary.worst:
        yield Advice("and the one with the highest", _show(folder, summary.best))
    if summary.report is not None:
        yield Advice("curves and conversations, for a browser", shown_folder(summary.report))
    if summary.steps:
        yield Advice("every transition, with its token ids", f"kitestring export {folder} --to transitions.parquet")


def _losses(summary: Summary, folder: str) -> Iterator[Advice]:
    if summary.excluded:
        worst = summary.excluded[0]
        excluded = sum(loss.count for loss in summary.excluded)
        yield Advice(f"{excluded} rollouts do not count, most often: {worst.reason}", _show(folder, worst.example))
    if summary.failures:
        worst = summary.failures[0]
        yield Advice(
            f"{worst.count} rollouts count although they ended in {worst.klass}: {worst.reason}",
            _show(folder, worst.example),
        )


def _learning(summary: Summary) -> Iterator[Advice]:
    if summary.rows_per_rollout is not None and summary.rows_per_rollout > FEW_ROWS:
        yield Advice(
            f"{summary.rows_per_rollout:.1f} rows a rollout: the agent's contexts do not extend each other, so prompts "
            "are trained on again and again; keep earlier messages as they were sent"
        )
    if summary.replies_cut_share is not None and summary.replies_cut_share > CUT_SHARE:
        yield Advice(
            f"{summary.replies_cut_share:.0%} of the replies were cut at their token limit: raise max_tokens in the "
            "agent, or spec.rollouts.sampling.maxTokens"
        )
    if summary.calls_nonconforming:
        yield Advice(
            f"{summary.calls_nonconforming} calls asked for other sampling than training assumes and were corrected: "
            "leave temperature, top_p and penalties out of the agent's requests"
        )
    share = summary.spread_share
    if share is not None and share < SPREAD_SHARE and summary.steps >= MIN_GROUPS_STEPS:
        yield Advice(
            f"only {share:.0%} of the groups had rollouts of different reward, and only they teach anything: the tasks "
            "are too hard or too easy; mix them, or raise spec.rollouts.groupSize"
        )


def shown_folder(path: str) -> str:
    """A path as one would type it here."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def _show(folder: str, rollout: str) -> str:
    return f"kitestring show {folder} {rollout}"
