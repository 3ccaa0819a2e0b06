"""From ended rollouts to the commit: which count, and why the others do not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kitestring_api.names import CLASS_INFRASTRUCTURE, CLASS_INVALID_TASK
from kitestring_trainer.commits import CommittedRollout
from kitestring_trainer.queue.rollouts import RolloutResult
from kitestring_trainer.samples.batches import EXCLUDED_GROUP


def committed_rollouts(results: Sequence[RolloutResult], min_group_size: int) -> tuple[CommittedRollout, ...]:
    """One entry per planned rollout, in the order of `results`."""
    rollouts = [_committed(result) for result in results]
    sizes = Counter(rollout.group for rollout in rollouts if rollout.excluded is None)
    small = {
        group: EXCLUDED_GROUP.format(found=n, limit=min_group_size) for group, n in sizes.items() if n < min_group_size
    }
    return tuple(
        replace(rollout, excluded=small[rollout.group])
        if rollout.excluded is None and rollout.group in small
        else rollout
        for rollout in rollouts
    )


def _committed(result: RolloutResult) -> CommittedRollout:
    ending = result.final.ending
    return CommittedRollout(
        rollout=result.rollout,
        group=result.group,
        task=result.task,
        klass=ending.klass,
        reason=ending.reason,
        attempt=result.final.attempt,
        tries=result.final.tries,
        epoch=ending.epoch,
        n_calls=ending.n_calls,
        digest=ending.digest,
        reward=ending.reward,
        reward_source=ending.reward_source,
        excluded=_exclusion(result),
    )


def _exclusion(result: RolloutResult) -> str | None:
    ending = result.final.ending
    if ending.klass in (CLASS_INFRASTRUCTURE, CLASS_INVALID_TASK) or result.proof is None:
        return ending.klass
    if ending.reward is None:
        return f"no reward: {ending.reason}" if ending.reason else "no reward"
    return None


def commonest_reason(rollouts: Sequence[CommittedRollout]) -> str:
    """One line on why rollouts were excluded: the most frequent reason, with its share."""
    reasons = Counter(f"{r.klass}: {r.reason or r.excluded}" for r in rollouts if r.excluded is not None)
    if not reasons:
        return "none was excluded"
    reason, count = reasons.most_common(1)[0]
    return f"{count} of {len(rollouts)} rollouts: {reason}"
