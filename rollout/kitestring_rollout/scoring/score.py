"""The reward of an attempt, by the pool's `spec.reward`: who scores, and what becomes of a score that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kitestring_api import names
from kitestring_api.v1alpha1.reward import ExitCodeReward, Reward
from kitestring_rollout.protocol.gateway_admin import PostedReward
from kitestring_rollout.scoring.builtin import builtin_score
from kitestring_rollout.scoring.command import command_reward
from kitestring_rollout.scoring.service import ScorerService
from kitestring_rollout.scoring.value import ScoreError, ScorerAwayError, reward_value

REWARD = "reward"
"""Name under which an agent posts the reward of its rollout; rewards of other names are for the record."""


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """What a scorer may see of an attempt that has ended."""

    visible: Mapping[str, Any]
    hidden: Mapping[str, Any]
    output: str | None
    """What the pool reads back (`agentProtocol.output`); None: there is none, as for `lastMessage` without any."""
    exit_code: int | None
    """None: ended by a signal, or by us."""
    rewards: Sequence[PostedReward] = ()
    """Accepted by the gateway, at most one per name."""
    calls: int = 0
    messages: Sequence[Mapping[str, Any]] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class Score:
    """A reward, or why there is none. `problem`: missing = nobody gave one; refused = it is no usable number, or the
    scorer failed; away = the scorer could not be asked."""

    reward: float | None
    reason: str | None = None
    problem: Literal["missing", "refused", "away"] | None = None


async def score(
    reward: Reward, given: ScoringInput, *, working_dir: Path | None = None, service: ScorerService | None = None
) -> Score:
    """Runs the pool's scorer, once; never raises for what agent, task or scorer did wrong.

    `working_dir` is where a command of the user's runs; `service` is the scorer of `source: scorer`.
    """
    try:
        value = await _value(reward, given, working_dir, service)
        if value is None:
            return Score(None, _missing(reward, given), "missing")
        return Score(reward_value(value, reward))
    except ScoreError as error:
        return Score(None, str(error), "away" if isinstance(error, ScorerAwayError) else "refused")


async def score_attempt(
    reward: Reward,
    outcome: str,
    given: ScoringInput,
    *,
    working_dir: Path | None = None,
    service: ScorerService | None = None,
) -> Score:
    """`score` where the outcome's rule asks for it, then `resolve_reward`: what an attempt is worth in the end."""
    wanted = _rule(reward, outcome, given.exit_code) == "score"
    scored = await score(reward, given, working_dir=working_dir, service=service) if wanted else Score(None)
    return resolve_reward(reward, outcome, scored, exit_code=given.exit_code)


def resolve_reward(reward: Reward, outcome: str, scored: Score, *, exit_code: int | None) -> Score:
    """What the score of an attempt of this failure class means; a reward of None is excluded. Pure.

    Succeeded: the score; where it is missing or was refused, `missing` decides (exclude, zero), but not for a scorer
    that was away: that is no agent's doing, and never a 0. AgentFailed and TimedOut: `onAgentFailure` and `onTimeout`
    decide (exclude, zero, score: as if it had succeeded). Infrastructure and InvalidTask are always excluded. With
    source exitCode an exit code is an answer and no failure: onAgentFailure: exclude then holds only for an agent that
    a signal ended.
    """
    rule = _rule(reward, outcome, exit_code)
    if rule == "zero":
        return Score(0.0, f"{outcome} counts as 0")
    if rule == "exclude":
        return Score(None, scored.reason, scored.problem)
    if scored.reward is None and scored.problem != "away" and reward.missing == "zero":
        return Score(0.0, f"{scored.reason}; counted as 0 (spec.reward.missing)", scored.problem)
    return scored


def _rule(reward: Reward, outcome: str, exit_code: int | None) -> Literal["exclude", "zero", "score"]:
    if outcome == names.CLASS_SUCCEEDED:
        return "score"
    if outcome == names.CLASS_AGENT_FAILED:
        is_answer = reward.source == "exitCode" and exit_code is not None and reward.on_agent_failure == "exclude"
        return "score" if is_answer else reward.on_agent_failure
    return reward.on_timeout if outcome == names.CLASS_TIMED_OUT else "exclude"


async def _value(reward: Reward, given: ScoringInput, working_dir: Path | None, service: ScorerService | None) -> Any:
    """What the source says, unchecked; None when there is nothing to score or nobody said anything."""
    if reward.source == "agent":
        return posted_reward(given.rewards)
    if reward.source == "exitCode":
        rewards = reward.exit_code or ExitCodeReward()
        return rewards.success if given.exit_code == 0 else rewards.failure
    if reward.source == "builtin" and reward.builtin is not None:
        row = {**given.visible, **given.hidden}
        if given.output is None:
            return None
        # Apart from the event loop: a slow expression of the user's holds nobody else up.
        return await asyncio.to_thread(builtin_score, reward.builtin, given.output, row)
    if reward.source == "command" and reward.command is not None:
        seconds = reward.command.timeout_seconds
        said = await command_reward(reward.command.command, _question(given), seconds=seconds, working_dir=working_dir)
        return reward_value(said, reward)
    if reward.source == "scorer" and service is not None:
        return reward_value(await service.reward(_question(given)), reward)
    raise ScoreError(f"spec.reward.source is {reward.source}, but there is nothing to ask")


def _question(given: ScoringInput) -> dict[str, Any]:
    """What a scorer of the user's is told."""
    question: dict[str, Any] = {
        "task": given.visible,
        "hidden": given.hidden,
        "output": given.output,
        "exitCode": given.exit_code,
        "calls": given.calls,
    }
    if given.messages is not None:
        question["messages"] = given.messages
    return question


def posted_reward(rewards: Sequence[PostedReward]) -> float | None:
    """The reward of the rollout among those that the agent posted: the one named `reward`, or the only one."""
    by_name = {posted.name: posted.value for posted in rewards}
    if REWARD in by_name:
        return by_name[REWARD]
    return next(iter(by_name.values())) if len(by_name) == 1 else None


def _missing(reward: Reward, given: ScoringInput) -> str:
    if reward.source == "agent":
        found = ", ".join(sorted(posted.name for posted in given.rewards))
        return f"the agent posted no reward named {REWARD!r}" + (f", but {found}" if found else "")
    return "the agent gave no output to score"
