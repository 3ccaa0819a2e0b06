"""What an attempt counts as: pure functions from what is known of its end to its failure class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kitestring_api.names import (
    CLASS_AGENT_FAILED,
    CLASS_INFRASTRUCTURE,
    CLASS_SUCCEEDED,
    CLASS_TIMED_OUT,
)
from kitestring_rollout.protocol.gateway_admin import FencedAttempt, RewardRule
from kitestring_rollout.protocol.queue import Finish
from kitestring_rollout.scoring import REWARD
from kitestring_rollout.traces.records import UNREACHABLE, CallRecord, EndRecord
from kitestring_trainer.queue.state import Ending

UNREACHABLE_STATUS = (502, 503, 504)
_CODE = f"{UNREACHABLE}: "
ERROR_IN_REASON = 200
"""Characters of an agent's last words that go into a reason."""


def classify(finish: Finish | None, deadline_seconds: float) -> tuple[str, str | None]:
    """Failure class and reason of an attempt by how its agent ended; None: the executor never said.

    The reason goes into logs, and what an agent has said into the reason: it is one line without control characters,
    which could forge lines of a log, or what a terminal shows of it.
    """
    klass, reason = _classified(finish, deadline_seconds)
    if reason is None:
        return klass, None
    return klass, "".join(sign for sign in " ".join(reason.splitlines()) if sign.isprintable())


def _classified(finish: Finish | None, deadline_seconds: float) -> tuple[str, str | None]:  # noqa: PLR0911  a table
    if finish is None:
        return CLASS_INFRASTRUCTURE, "executor lost: its lease expired"
    match finish.ended:
        case "exited" if finish.exit_code == 0:
            return CLASS_SUCCEEDED, None
        case "exited":
            return CLASS_AGENT_FAILED, _with_last_words(f"exit code {finish.exit_code}", finish)
        case "signalled":
            reason = f"ended by signal {finish.signal}"
            return CLASS_AGENT_FAILED, f"{reason}: {finish.message}" if finish.message else _with_last_words(
                reason, finish
            )
        case "deadline":
            return CLASS_TIMED_OUT, f"no end within {deadline_seconds:g} s"
        case "cutOff":
            return CLASS_INFRASTRUCTURE, _with_last_words(f"no gateway: {finish.message or 'no cause given'}", finish)
        case "startFailed":
            return CLASS_INFRASTRUCTURE, f"agent could not start: {finish.message or 'no cause given'}"
        case "cancelled":
            return CLASS_INFRASTRUCTURE, f"cancelled: {finish.message or 'by the executor'}"
        case "executorLost":
            return CLASS_INFRASTRUCTURE, f"executor lost: {finish.message or 'no cause given'}"


def executor_finish(attempt: str, klass: str, message: str) -> Finish:
    """What an executor would have said that ended without a word, by what the cluster says of its pod."""
    text = message[:4096]
    match klass:
        case "AgentFailed":  # by the kernel, for its memory
            return Finish(attempt=attempt, ended="signalled", signal=9, message=text, seconds=0)
        case "TimedOut":
            return Finish(attempt=attempt, ended="deadline", message=text, seconds=0)
        case _:
            return Finish(attempt=attempt, ended="executorLost", message=text, seconds=0)


def has_given_its_result(fenced: FencedAttempt, rule: RewardRule) -> bool:
    """Whether an attempt whose executor was lost is over by what its gateway saw: it then counts, and none is opened.

    Calls alone cannot say so, since an agent that was killed between two of them leaves whole traces too. An agent that
    posted the reward which decides its rollout, and was in no call when it was fenced, has said that it is done. With
    `duplicates: last` or `max` a later reward might have come.
    """
    decided = any(posted.name == REWARD for posted in fenced.rewards)
    return (
        fenced.lost is None
        and fenced.calls.cancelled == 0
        and rule.accepted
        and rule.duplicates in ("refuse", "first")
        and decided
    )


def judge(end: EndRecord, calls: Sequence[CallRecord], accepted: Callable[[str], bool] | None) -> Ending:
    """The ending of a proven attempt, from its records.

    An agent that failed after the gateway could not reach its model failed for the infrastructure's sake; what a model
    server answered is no excuse, since it depends on what the agent asked. `accepted` says which policy versions its
    tokens may come from; None: any.
    """
    klass, reason = end.outcome, end.reason
    if klass in (CLASS_AGENT_FAILED, CLASS_TIMED_OUT):
        failed = last_unreachable(calls)
        if failed is not None:
            klass = CLASS_INFRASTRUCTURE
            reason = f"model {failed.model} could not be reached at call {failed.seq} ({failed.error}); then {reason}"
    stale = None if accepted is None else stale_version(calls, accepted)
    if stale is not None and klass != CLASS_INFRASTRUCTURE:
        klass, reason = CLASS_INFRASTRUCTURE, stale
    lost = klass == CLASS_INFRASTRUCTURE
    return Ending(
        klass=klass,
        reason=reason,
        reward=None if lost else end.reward,
        reward_source=None if lost else end.reward_source,
        epoch=end.epoch,
        n_calls=end.n_calls,
        digest=end.digest,
    )


def last_unreachable(calls: Sequence[CallRecord]) -> CallRecord | None:
    """The call for which the gateway reached no model server, if the agent got no answer of a model after it."""
    for call in sorted(calls, key=lambda call: call.seq, reverse=True):
        if call.outcome == "failed" and call.status in UNREACHABLE_STATUS and (call.error or "").startswith(_CODE):
            return call
        if call.outcome != "cancelled":
            return None
    return None


def stale_version(calls: Sequence[CallRecord], accepted: Callable[[str], bool]) -> str | None:
    """Why not every trained token comes from an accepted policy version; None when all do."""
    for call in calls:
        if not call.trained:
            continue
        for choice in call.choices:
            for span in choice.versions:
                if not accepted(span.version):
                    return f"call {call.seq} was sampled from policy version {span.version}, which is not trained now"
    return None


def _with_last_words(reason: str, finish: Finish) -> str:
    """What the executor says of the end, where it says something; else what the agent said last."""
    if finish.message:
        return f"{reason}: {finish.message}"
    lines = [line.strip() for line in finish.log_tail.splitlines() if line.strip()]
    return f"{reason}: {lines[-1][:ERROR_IN_REASON]}" if lines else reason
