"""Transitions: one per reply choice of a trained policy, (input ids, output ids, log probabilities)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kitestring_rollout.traces.records import CallRecord, ChoiceRecord, VersionSpan

MISSING_LOGPROB = -9999.0
"""What vLLM reports where it has no log probability."""

EXCLUDED_OUTCOME = "call {outcome}"
EXCLUDED_AGENT = "agent not selected"
EXCLUDED_NO_IDS = "no token ids recorded"
EXCLUDED_EMPTY = "empty reply"
EXCLUDED_NO_LOGPROBS = "no log probabilities recorded"
EXCLUDED_NO_VERSION = "policy version unknown"
EXCLUDED_ABORTED = "generation aborted"


@dataclass(frozen=True, slots=True)
class Transition:
    """One reply choice: `prompt_ids` int32 [P], `response_ids` int32 [T], `logprobs` float32 [T] (natural log)."""

    rollout: str
    attempt: str
    seq: int
    choice: int
    policy: str
    agent: str | None
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    finish_reason: str | None
    excluded: str | None
    """Why it is no sample; None for one that may be trained on."""


def transitions(calls: Sequence[CallRecord], *, agents: Collection[str] = ()) -> list[Transition]:
    """Transitions of one attempt in the order of admission; calls to frozen models are none.

    `agents` are the names in `algorithm.select.agents`; empty selects all. What may not be trained on stays in the list
    with its reason in `excluded`, so that an export can show it.
    """
    selected: list[Transition] = []
    for call in sorted(calls, key=lambda call: call.seq):
        if not call.trained:
            continue
        selected.extend(_transition(call, choice, agents) for choice in call.choices)
    return selected


def _transition(call: CallRecord, choice: ChoiceRecord, agents: Collection[str]) -> Transition:
    return Transition(
        rollout=call.rollout,
        attempt=call.attempt,
        seq=call.seq,
        choice=choice.index,
        policy=call.model,
        agent=call.agent,
        prompt_ids=np.asarray(call.prompt_token_ids, np.int32),
        response_ids=np.asarray(choice.token_ids, np.int32),
        logprobs=np.asarray(choice.logprobs, np.float32),
        versions=tuple(choice.versions),
        finish_reason=choice.finish_reason,
        excluded=_exclusion(call, choice, agents),
    )


def _exclusion(call: CallRecord, choice: ChoiceRecord, agents: Collection[str]) -> str | None:  # noqa: PLR0911
    if call.outcome != "ok":
        return EXCLUDED_OUTCOME.format(outcome=call.outcome)
    if agents and call.agent not in agents:
        return EXCLUDED_AGENT
    if choice.finish_reason == "abort":
        return EXCLUDED_ABORTED
    if not len(call.prompt_token_ids):
        return EXCLUDED_NO_IDS
    if not len(choice.token_ids):
        return EXCLUDED_NO_IDS if choice.text or choice.message else EXCLUDED_EMPTY
    logprobs = np.asarray(choice.logprobs, np.float32)
    if len(logprobs) != len(choice.token_ids) or not np.all(np.isfinite(logprobs)) or logprobs.min() <= MISSING_LOGPROB:
        return EXCLUDED_NO_LOGPROBS
    if not _covers(choice.versions, len(choice.token_ids)):
        return EXCLUDED_NO_VERSION
    return None


def _covers(versions: Sequence[VersionSpan], length: int) -> bool:
    position = 0
    for span in versions:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == length
