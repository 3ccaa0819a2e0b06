"""Closing an attempt: fence its gateway, score it, write its end record. Each once, in this order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kitestring_api.names import CLASS_INFRASTRUCTURE, CLASS_SUCCEEDED
from kitestring_rollout.protocol.gateway_admin import EndAttempt, FencedAttempt, RewardRule
from kitestring_rollout.protocol.queue import Finish
from kitestring_trainer.queue.gateways import EpochGoneError, Gateways
from kitestring_trainer.queue.state import Place
from kitestring_trainer.queue.verdict import classify, has_given_its_result
from kitestring_trainer.tasks import Task

logger = logging.getLogger(__name__)

KEEP_SECONDS = 120.0
"""How often a gateway is told, while an attempt waits for its score, that its end will come: it drops those that nobody
ends."""
RECORDED_OUTPUT = 65536
"""Characters of an agent's output that its end record keeps; scorers see all that the pool reads back."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What scoring gave. A reward that is missing is None and has its reason."""

    reward: float | None
    reason: str | None
    source: str | None


Scorer = Callable[[str, Task, Finish | None, FencedAttempt], Awaitable[Scored]]
"""(failure class, task, how the agent ended, what the gateway knows) → score. Never raises for what a scorer did.
Without a finish only what the gateway knows can be scored."""


@dataclass(frozen=True, slots=True)
class Closed:
    """An attempt that takes no further call. `provable`: an end record was, or may have been, written."""

    klass: str
    reason: str | None
    reward: float | None = None
    reward_source: str | None = None
    n_calls: int | None = None
    digest: str | None = None
    provable: bool = False


async def close_attempt(
    gateways: Gateways,
    score: Scorer,
    place: Place,
    attempt: str,
    *,
    task: Task,
    finish: Finish | None,
    deadline_seconds: float,
    reward_rule: RewardRule,
) -> Closed:
    """Close the attempt that lies at `place`; `finish` is None when its executor was lost.

    An attempt without its gateway, or of which the gateway lost a call, is Infrastructure whatever its agent did. One
    that lost its executor after it had given its result counts (docs/rollouts.md says when).
    """
    klass, reason = classify(finish, deadline_seconds)
    try:
        fenced = await gateways.fence(place, attempt)
    except EpochGoneError as error:
        return Closed(CLASS_INFRASTRUCTURE, f"gateway lost: {error}")
    if finish is None and has_given_its_result(fenced, reward_rule):
        logger.info("attempt %s lost its executor after it had given its result: it counts", attempt)
        klass, reason = CLASS_SUCCEEDED, None
    scored = Scored(None, None, None)
    if fenced.lost is not None:
        klass, reason = CLASS_INFRASTRUCTURE, f"trace lost: {fenced.lost}"
    elif klass != CLASS_INFRASTRUCTURE:
        try:
            scored = await _kept(gateways, place, attempt, score(klass, task, finish, fenced))
        except EpochGoneError as error:
            return Closed(CLASS_INFRASTRUCTURE, f"gateway lost: {error}")
        reason = "; ".join(text for text in (reason, scored.reason) if text) or None
    provable = klass != CLASS_INFRASTRUCTURE
    end = EndAttempt(
        outcome=klass,
        reason=reason,
        reward=scored.reward,
        reward_source=scored.source,
        exit_code=finish.exit_code if finish is not None else None,
        seconds=finish.seconds if finish is not None else None,
        output=finish.output[:RECORDED_OUTPUT] if finish is not None else None,
    )
    try:
        ended = await gateways.end(place, attempt, end)
    except EpochGoneError as error:
        # The record may have been written before the gateway went: then its proof appears, else the grace runs out.
        logger.warning("attempt %s: gateway lost while it ended: %s", attempt, error)
        return Closed(klass, reason, scored.reward, scored.source, fenced.n_calls, fenced.digest, provable)
    return Closed(klass, reason, scored.reward, scored.source, ended.n_calls, ended.digest, provable)


async def _kept(gateways: Gateways, place: Place, attempt: str, scoring: Awaitable[Scored]) -> Scored:
    """What scoring gives, however long it takes: the gateway keeps the attempt meanwhile. Raises EpochGoneError."""
    task = asyncio.ensure_future(scoring)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=KEEP_SECONDS)
            if not task.done():
                await gateways.fence(place, attempt)
        return task.result()
    finally:
        task.cancel()
