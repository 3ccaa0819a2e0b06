"""Scores of ended attempts by the pool's rules, in the queue's process: hidden fields never reach an agent's pod."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPoolSpec
from kitestring_rollout.protocol.gateway_admin import FencedAttempt
from kitestring_rollout.protocol.queue import Finish
from kitestring_rollout.scoring import ScorerService, ScoringInput, score_attempt
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.queue.closing import Scored, Scorer
from kitestring_trainer.tasks import Task

START_SECONDS: Final = 1800.0
"""How long a scorer may take to start: its image has to be pulled, a model of its own loaded."""


def make_scorer(pool: RolloutPoolSpec, working_folder: Path | None, service: ScorerService | None) -> Scorer:
    """The scorer of a run; `working_folder` is where a command of the user's runs, `service` its scorer container."""
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
        scored = await score_attempt(pool.reward, klass, given, working_dir=working_folder, service=service)
        source = pool.reward.source if scored.reward is not None else None
        return Scored(scored.reward, scored.reason, source)

    return score


async def scorer_listens(service: ScorerService, seconds: float = START_SECONDS) -> None:
    """Return when it can be asked: what is scored before that is lost. Raises RunFailedError when the time is up."""
    try:
        async with asyncio.timeout(seconds):
            await service.wait()
    except TimeoutError:
        message = f"the scorer {service.url} accepts no connection {seconds:.0f} s after the trainer's start"
        raise RunFailedError(names.REASON_SCORER_UNREACHABLE, message, restart_helps=True) from None
