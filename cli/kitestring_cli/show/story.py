"""A rollout as plain data: its attempts, what was said in each call, and what became of it in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kitestring_cli.inspection.attempts import calls_of, plan_attempts, proven_as_committed
from kitestring_cli.inspection.records import RunRecords
from kitestring_cli.show.finding import PlannedRollout
from kitestring_rollout.traces.attempts import LostAttempt, ProvenAttempt
from kitestring_rollout.traces.records import CallRecord, ChoiceRecord, EndRecord, Json
from kitestring_trainer.commits import CommittedRollout
from kitestring_trainer.samples.batches import SampleRecord

Samples = Mapping[tuple[str, int, int], SampleRecord]


@dataclass(frozen=True)
class AttemptStory:
    """One attempt. `lost` says why it is not provably complete; None for a complete one."""

    attempt: str
    calls: tuple[CallRecord, ...]
    end: EndRecord | None
    lost: str | None
    counts: bool
    """Whether it is the attempt that the commit names."""


@dataclass(frozen=True)
class RolloutStory:
    planned: PlannedRollout
    committed: CommittedRollout | None
    """None: its step was not committed."""
    attempts: tuple[AttemptStory, ...]
    """In the order of time."""
    samples: Samples
    notes: tuple[str, ...]
    """What in storage could not be read."""

    @property
    def main(self) -> AttemptStory | None:
        """The attempt that counts, else the last one."""
        counting = [attempt for attempt in self.attempts if attempt.counts]
        return (counting or self.attempts or (None,))[-1]


def rollout_story(records: RunRecords, planned: PlannedRollout) -> RolloutStory:
    """Reads the traces of the rollout. Raises UserMistakeError."""
    commit = records.commit(planned.mode, planned.step)
    committed = next((r for r in commit.rollouts if r.rollout == planned.rollout), None) if commit else None
    found = plan_attempts(
        records, planned.mode, planned.step, wanted=lambda rollout: rollout == planned.rollout, contents=True
    )
    counting = proven_as_committed(committed, found) if committed is not None else None
    both: dict[str, ProvenAttempt | LostAttempt] = {**found.lost, **found.proven}
    stories = tuple(attempt_story(both[name], counts=both[name] is counting) for name in sorted(both))
    samples: Samples = {}
    if planned.mode == "train" and committed is not None:
        samples = {key: record for key, record in records.samples(planned.step).items() if key[0] in both}
    return RolloutStory(planned, committed, stories, samples, tuple(found.notes))


def attempt_story(attempt: ProvenAttempt | LostAttempt, *, counts: bool) -> AttemptStory:
    lost = attempt.reason if isinstance(attempt, LostAttempt) else None
    return AttemptStory(attempt.attempt, calls_of(attempt), attempt.end, lost, counts)


def new_messages(call: CallRecord, earlier: Sequence[CallRecord]) -> tuple[int | None, tuple[Json, ...]]:
    """(number of the call that this one goes on from, messages that no earlier call and no earlier reply showed).

    A call goes on from the earlier one whose prompt is the longest that its own begins with.
    """
    base = max(
        (known for known in earlier if known.messages and call.messages[: len(known.messages)] == known.messages),
        key=lambda known: (len(known.messages), known.seq),
        default=None,
    )
    if base is None:
        return None, call.messages
    new = call.messages[len(base.messages) :]
    replies = [choice.message for choice in base.choices if choice.message is not None]
    if new and any(_same_reply(new[0], reply) for reply in replies):
        new = new[1:]
    return base.seq, new


def _same_reply(message: Json, reply: Json) -> bool:
    """Agents leave fields out when they send a reply back; what was said is what counts."""
    return (message.get("role"), message.get("content") or None, message.get("tool_calls") or None) == (
        reply.get("role"),
        reply.get("content") or None,
        reply.get("tool_calls") or None,
    )


def story_json(story: RolloutStory, attempts: Sequence[AttemptStory], *, ids: bool) -> dict[str, Any]:
    """Plain data of the rollout and of these attempts; `ids` adds token ids and logprobs."""
    committed = story.committed
    return {
        "rollout": story.planned.rollout,
        "mode": story.planned.mode,
        "step": story.planned.step,
        "group": committed.group if committed else None,
        "task": committed.task if committed else None,
        "class": committed.klass if committed else None,
        "reason": committed.reason if committed else None,
        "reward": committed.reward if committed else None,
        "excluded": committed.excluded if committed else None,
        "committed_attempt": committed.attempt if committed else None,
        "attempts": [attempt_json(attempt, story.samples, ids=ids) for attempt in attempts],
        "notes": list(story.notes),
    }


def attempt_json(attempt: AttemptStory, samples: Samples, *, ids: bool) -> dict[str, Any]:
    end = attempt.end
    return {
        "attempt": attempt.attempt,
        "complete": attempt.lost is None,
        "lost": attempt.lost,
        "counts": attempt.counts,
        "class": end.outcome if end else None,
        "reason": end.reason if end else None,
        "reward": end.reward if end else None,
        "reward_source": end.reward_source if end else None,
        "exit_code": end.exit_code if end else None,
        "seconds": end.seconds if end else None,
        "output": end.output if end else None,
        "calls": list(_calls_json(attempt, samples, ids=ids)),
    }


def _calls_json(attempt: AttemptStory, samples: Samples, *, ids: bool) -> Iterator[dict[str, Any]]:
    for place, call in enumerate(attempt.calls):
        goes_on_from, messages = new_messages(call, attempt.calls[:place])
        data: dict[str, Any] = {
            "seq": call.seq,
            "api": call.api,
            "model": call.model,
            "requested_model": call.requested_model,
            "agent": call.agent,
            "trained": call.trained,
            "outcome": call.outcome,
            "status": call.status,
            "error": call.error,
            "sampling": call.sampling,
            "nonconforming": list(call.nonconforming),
            "goes_on_from": goes_on_from,
            "messages": list(messages),
            "tools": list(call.tools) if call.tools is not None else None,
            "prompt_tokens": call.prompt_tokens,
            "completion_tokens": call.completion_tokens,
            "seconds": (call.ended_unix_nano - call.started_unix_nano) / 1e9,
            "choices": [
                _choice_json(choice, samples.get((attempt.attempt, call.seq, choice.index)), ids=ids)
                for choice in call.choices
            ],
        }
        if ids:
            data["prompt_token_ids"] = call.prompt_token_ids.tolist()
        yield data


def _choice_json(choice: ChoiceRecord, sample: SampleRecord | None, *, ids: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "message": choice.message,
        "text": choice.text,
        "tool_calls": choice.tool_calls,
        "policy_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in choice.versions],
    }
    if sample is not None:
        data |= {
            "row": sample.row,
            "credit": sample.credit,
            "advantage": sample.advantage,
            "loss_weight": sample.loss_weight,
            "excluded": sample.excluded,
        }
    if ids:
        data |= {"token_ids": choice.token_ids.tolist(), "logprobs": choice.logprobs.tolist()}
    return data
