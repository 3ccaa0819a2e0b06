"""What one rollout says about an agent: the rows it would give, the limits it used, what to mend. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kitestring_api.v1alpha1 import RolloutPoolSpec, TrainingRunSpec
from kitestring_cli.show.story import new_messages
from kitestring_rollout.gateway.sampling import nonconforming, reason
from kitestring_rollout.traces.records import CallRecord, ChoiceRecord, EndRecord
from kitestring_trainer.samples.rows import Row, RowLimits, merge_rows
from kitestring_trainer.samples.transitions import EXCLUDED_NO_VERSION, Transition, transitions

_LIKE_A_CALL = re.compile(
    r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|<function=|<｜tool▁call|"
    r"\{\s*\"(name|arguments)\"\s*:.*\"(arguments|name)\"\s*:",
    re.DOTALL,
)
"""How models write tool calls when the server does not take them out of the text."""


@dataclass(frozen=True)
class Rows:
    """`sentence` says it all; counts are of tokens. `dropped` are rows over a limit, with its reason."""

    sentence: str
    calls: int
    rows: int
    trained: int
    masked: int
    prompt: int
    dropped: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limit:
    name: str
    used: float
    allowed: float


def rows_of(calls: Sequence[CallRecord], spec: TrainingRunSpec) -> Rows:
    """What the calls would be trained on as. Versions of the weights are a run's matter: they may be missing here."""
    found = [_without_version(t) for t in transitions(calls, agents=spec.algorithm.select.agents)]
    limits = spec.algorithm.max_row_tokens
    rows = merge_rows(found, RowLimits(limits.prompt, limits.response))
    usable = [transition for transition in found if transition.excluded is None]
    trained = sum(int(row.response_mask.sum()) for row in rows)
    masked = sum(int((~row.response_mask).sum()) for row in rows)
    excluded = tuple(
        f"call {t.seq}{f', choice {t.choice}' if t.choice else ''}: {t.excluded}" for t in found if t.excluded
    )
    return Rows(
        sentence=_sentence(calls, found, usable, rows),
        calls=len(calls),
        rows=len(rows),
        trained=trained,
        masked=masked,
        prompt=sum(len(row.prompt_ids) for row in rows),
        dropped=tuple(row.dropped for row in rows if row.dropped is not None),
        excluded=excluded,
    )


def _without_version(transition: Transition) -> Transition:
    return replace(transition, excluded=None) if transition.excluded == EXCLUDED_NO_VERSION else transition


def _sentence(  # noqa: PLR0911 - one for each case
    calls: Sequence[CallRecord], found: Sequence[Transition], usable: Sequence[Transition], rows: Sequence[Row]
) -> str:
    if not calls:
        return "no call, so nothing to train on: the agent never called a model"
    if not found:
        return f"{_count(len(calls), 'call')} to a model that reports no token ids: no rows; {_by_messages(calls)}"
    if not usable:
        return f"{_count(len(found), 'reply', 'replies')}, none of which can be trained on: no rows"
    arrow = f"{_count(len(usable), 'reply', 'replies')} → {_count(len(rows), 'row')}"
    if len(usable) == 1:
        return arrow
    if len(rows) == 1:
        return f"{arrow}: your agent's contexts extend each other"
    if len(rows) == len(usable):
        where = _departure(usable)
        return f"{arrow}: your agent's contexts do not extend each other{f'; {where}' if where else ''}"
    return f"{arrow}: some of your agent's contexts extend each other"


def _departure(usable: Sequence[Transition]) -> str | None:
    """Where the second prompt leaves the context of the first reply."""
    first, second = usable[0], next((t for t in usable if t.seq != usable[0].seq), None)
    if second is None:
        return None
    context = np.concatenate([first.prompt_ids, first.response_ids])
    length = min(len(context), len(second.prompt_ids))
    differs = np.flatnonzero(context[:length] != second.prompt_ids[:length])
    at = int(differs[0]) if len(differs) else length
    where = "its prompt" if at < len(first.prompt_ids) else "its reply"
    return f"call {second.seq} departs from call {first.seq} at token {at} of {len(context)}, in {where}"


def _by_messages(calls: Sequence[CallRecord]) -> str:
    bases = [new_messages(call, calls[:place])[0] for place, call in enumerate(calls)]
    if len(calls) == 1:
        return "a policy server would report them"
    if all(base == earlier.seq for base, earlier in zip(bases[1:], calls[:-1], strict=True)):
        return "by its messages, each call goes on from the one before, which gives one row"
    apart = [call.seq for call, base in zip(calls[1:], bases[1:], strict=True) if base is None]
    if apart:
        return f"by its messages, call {', '.join(map(str, apart))} begins anew, which gives more than one row"
    return "by its messages, its calls branch, which gives more than one row"


def limits_used(calls: Sequence[CallRecord], end: EndRecord | None, pool: RolloutPoolSpec) -> list[Limit]:
    """Of the pool's limits that a rollout is counted against."""
    tokens = sum((call.prompt_tokens or 0) + (call.completion_tokens or 0) for call in calls)
    used = [Limit("calls", len(calls), pool.limits.calls), Limit("tokens", tokens, pool.limits.tokens)]
    if end is not None and end.seconds is not None:
        used.append(Limit("seconds", end.seconds, pool.limits.seconds))
    return used


def warnings(
    calls: Sequence[CallRecord],
    end: EndRecord | None,
    spec: TrainingRunSpec,
    *,
    reports_ids: bool,
    asked: Collection[str],
) -> list[str]:
    """A sentence for each thing to mend. `asked`: names by which the agent may ask for the policy."""
    return list(_warnings(calls, end, spec, reports_ids, asked))


def _warnings(
    calls: Sequence[CallRecord], end: EndRecord | None, spec: TrainingRunSpec, reports_ids: bool, asked: Collection[str]
) -> Iterator[str]:
    for call in calls:
        for name in nonconforming(dict(call.sampling), spec.rollouts.sampling.temperature):
            what = f"call {call.seq} asks for {name} {call.sampling[name]}"
            yield f"{what}: in training it is refused or corrected ({reason(name)})"
        if call.outcome != "ok":
            yield f"call {call.seq} {call.outcome}: {call.error or call.status or 'no cause given'}"
        for choice in call.choices:
            yield from _of_choice(call, choice, reports_ids)
    if end is not None and end.calls.rejected:
        known = ", ".join(asked)
        yield (
            f"{end.calls.rejected} requests were refused before they counted as calls: over a limit of the pool, not a "
            f"request at all, or for a model of another name than {known}"
        )


def _of_choice(call: CallRecord, choice: ChoiceRecord, reports_ids: bool) -> Iterator[str]:
    if choice.finish_reason == "length":
        yield f"call {call.seq}: the reply was cut at its token limit"
    content = choice.message.get("content") if choice.message is not None else None
    if call.tools and not choice.tool_calls and isinstance(content, str) and _LIKE_A_CALL.search(content):
        yield (
            f"call {call.seq}: the reply reads like a tool call, and the server did not parse it: "
            "set spec.policies[].toolParser, or the parser of your endpoint"
        )
    if reports_ids and call.trained and call.outcome == "ok" and not len(choice.token_ids):
        yield f"call {call.seq}: the server reports no token ids for it"


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
