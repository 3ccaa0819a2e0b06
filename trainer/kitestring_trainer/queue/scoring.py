"""Scores of ended attempts by the pool's rules, in the queue's process: hidden fields never reach an agent's pod."""

from __future__ import annotations

from pathlib import Path

from kitestring_api.v1alpha1 import RolloutPoolSpec
from kitestring_rollout.protocol.gateway_admin import FencedAttempt
from kitestring_rollout.protocol.queue import Finish
from kitestring_rollout.scoring import ScoringInput, score_attempt
from kitestring_trainer.queue.closing import Scored, Scorer
from kitestring_trainer.tasks import Task


def make_scorer(pool: RolloutPoolSpec, working_folder: Path | None) -> Scorer:
    """The scorer of a run; `working_folder` is where a command of the user's runs."""
    output_from = pool.agent_protocol.output.from_

    async def score(klass: str, task: Task, finish: Finish | None, fenced: FencedAttempt) -> Scored:
        said = finish.output if finish is not None else None
        output = {"lastMessage": fenced.last_message, "none": None}.get(output_from, said)
        given = ScoringInput(
            visible=task.visible,
            hidden=task.hidden,
            output=output,
            exit_code=finish.exit_code if finish is not None else None,
            rewards=fenced.rewards,
            calls=fenced.n_calls,
        )
        scored = await score_attempt(pool.reward, klass, given, working_dir=working_folder)
        source = pool.reward.source if scored.reward is not None else None
        return Scored(scored.reward, scored.reason, source)

    return score
