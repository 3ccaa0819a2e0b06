"""Rows of an export: every transition, or every conversation, of the proven attempts of one plan at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kitestring_api.names import CLASS_INFRASTRUCTURE, MODE_TRAIN
from kitestring_cli.inspection.attempts import PlanAttempts, calls_of, plan_attempts, proven_as_committed
from kitestring_cli.inspection.records import RunRecords
from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.records import CallRecord, EndRecord
from kitestring_trainer.commits import CommittedRollout, StepCommit
from kitestring_trainer.samples.batches import SampleRecord
from kitestring_trainer.samples.transitions import Transition, transitions

Row = dict[str, Any]
Samples = Mapping[tuple[str, int, int], SampleRecord]
Note = Callable[[str], None]

TRANSITION_COLUMNS: Final = (
    "run", "step", "task", "group", "rollout", "attempt", "seq", "choice", "policy", "agent",
    "prompt_token_ids", "response_token_ids", "response_logprobs", "policy_versions", "finish_reason",
    "reward", "credit", "advantage", "row", "loss_weight", "excluded",
)  # fmt: skip
MESSAGE_COLUMNS: Final = (
    "run", "step", "task", "group", "rollout", "attempt", "policy", "agent", "reward", "excluded", "messages", "tools",
)  # fmt: skip

NOT_TRAINING: Final = "mode {mode} is not trained on"
NOT_COUNTED: Final = "another attempt counts for this rollout"
NOT_COMMITTED: Final = "step {step} was not committed"
SUPERSEDED: Final = "superseded: sampled from weights that are no more"
NO_SAMPLE: Final = "no sample was made of it"


def transition_rows(records: RunRecords, mode: Mode, step: int, note: Note) -> Iterator[Row]:
    """A row for each transition, ids bit for bit as they were recorded (numpy arrays), in the order of the plan.

    `excluded` is None exactly where a transition was trained on. Raises UserMistakeError.
    """
    samples: Samples = records.samples(step) if mode == MODE_TRAIN else {}
    agents = records.config.spec.algorithm.select.agents
    for attempt, why in _attempts(records, mode, step, note, contents=False):
        for transition in transitions(calls_of(attempt), agents=agents):
            sample = samples.get((attempt.attempt, transition.seq, transition.choice))
            yield _transition_row(attempt.end, transition, sample, why)


def _transition_row(end: EndRecord, transition: Transition, sample: SampleRecord | None, why: str | None) -> Row:
    if sample is not None and why is None:
        why = sample.excluded
    return {
        **_names(end),
        "seq": transition.seq,
        "choice": transition.choice,
        "policy": transition.policy,
        "agent": transition.agent,
        "prompt_token_ids": transition.prompt_ids,
        "response_token_ids": transition.response_ids,
        "response_logprobs": transition.logprobs,
        "policy_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in transition.versions],
        "finish_reason": transition.finish_reason,
        "reward": end.reward,
        "credit": sample.credit if sample is not None else None,
        "advantage": sample.advantage if sample is not None else None,
        "row": sample.row if sample is not None else None,
        "loss_weight": sample.loss_weight if sample is not None else 0.0,
        "excluded": why or transition.excluded or (None if sample is not None else NO_SAMPLE),
    }


def message_rows(records: RunRecords, mode: Mode, step: int, note: Note) -> Iterator[Row]:
    """A row for each conversation of each attempt: all its messages in OpenAI's shape, the last reply included.

    An agent whose calls extend each other has one conversation; sub-agents have one each. Raises UserMistakeError.
    """
    for attempt, why in _attempts(records, mode, step, note, contents=True):
        calls = [call for call in calls_of(attempt) if call.outcome == "ok"]
        end = attempt.end
        for call in calls:
            if _is_continued(call, calls):
                continue
            for choice in call.choices:
                reply = choice.message or {"role": "assistant", "content": choice.text}
                if not call.messages or (choice.message is None and choice.text is None):
                    note(f"{attempt.attempt}: no contents were recorded (spec.traces.recordContents), left out")
                    continue
                yield {
                    **_names(end),
                    "policy": call.model,
                    "agent": call.agent,
                    "reward": end.reward,
                    "excluded": why,
                    "messages": [*call.messages, reply],
                    "tools": list(call.tools) if call.tools is not None else None,
                }


def _names(end: EndRecord) -> Row:
    """What every row says of the attempt that it comes from."""
    return {name: getattr(end, name) for name in ("run", "step", "task", "group", "rollout", "attempt")}


def _is_continued(call: CallRecord, calls: list[CallRecord]) -> bool:
    """Whether a later call begins with all messages of this one and says more."""
    length = len(call.messages)
    return any(
        other.seq > call.seq and len(other.messages) > length and other.messages[:length] == call.messages
        for other in calls
    )


def _attempts(
    records: RunRecords, mode: Mode, step: int, note: Note, *, contents: bool
) -> Iterator[tuple[ProvenAttempt, str | None]]:
    """Every proven attempt of the plan in its order, and why it was not trained on (None: its transitions say)."""
    plan, commit = records.plan(mode, step), records.commit(mode, step)
    found = plan_attempts(records, mode, step, contents=contents)
    for problem in found.notes:
        note(f"{mode} step {step}: {problem}")
    by_rollout: dict[str, list[ProvenAttempt]] = {}
    for name in sorted(found.proven):
        by_rollout.setdefault(found.proven[name].end.rollout, []).append(found.proven[name])
    committed = {rollout.rollout: rollout for rollout in commit.rollouts} if commit is not None else {}
    for rollout in plan[0].rollouts if plan is not None else ():
        yield from _of_rollout(by_rollout.get(rollout, []), committed.get(rollout), commit, step, found, note)


def _of_rollout(  # noqa: PLR0917 - what is known of a rollout
    attempts: list[ProvenAttempt],
    rollout: CommittedRollout | None,
    commit: StepCommit | None,
    step: int,
    found: PlanAttempts,
    note: Note,
) -> Iterator[tuple[ProvenAttempt, str | None]]:
    counting = proven_as_committed(rollout, found) if rollout is not None else None
    if rollout is not None and rollout.excluded is None and counting is None:
        note(f"{rollout.rollout}: the trace of attempt {rollout.attempt}, which counts, is not in storage any more")
    for attempt in attempts:
        yield attempt, _why_not(attempt, attempt is counting, rollout, commit, step)


def _why_not(
    attempt: ProvenAttempt, counts: bool, rollout: CommittedRollout | None, commit: StepCommit | None, step: int
) -> str | None:
    if rollout is None or commit is None:
        return NOT_COMMITTED.format(step=step)
    if attempt.attempt in commit.superseded:
        return SUPERSEDED
    if not counts:
        return f"{NOT_COUNTED}; this one ended in {attempt.end.outcome}"
    if rollout.excluded is not None:
        same = rollout.excluded in (rollout.klass, CLASS_INFRASTRUCTURE)
        return f"{rollout.klass}: {rollout.reason}" if same and rollout.reason else rollout.excluded
    return None if commit.mode == MODE_TRAIN else NOT_TRAINING.format(mode=commit.mode)
