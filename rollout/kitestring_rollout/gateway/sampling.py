"""What a training call may ask of the sampler: one table, one reason per field. Pure.

The trainer computes the log-probability of every token under the plain distribution of the policy at the run's
temperature. A request field that makes the server sample from any other distribution makes the recorded logprobs say
something else than what the trainer assumes. Fields that only end a reply (stop, max_tokens) or pick the random numbers
(seed) do not, and pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kitestring_api import names

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """`conforms(value)` for a value that is present and not null; a value that does not is dropped from the request
    (and what the mode demands is put there afterwards)."""

    conforms: Callable[[Any], bool]
    reason: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda found: not isinstance(found, bool | dict | list) and found in values


def _is_false(found: Any) -> bool:
    return found is False


def _is_empty(found: Any) -> bool:
    return not found


def _is_text_format(found: Any) -> bool:
    return isinstance(found, dict) and found.get("type") == "text"


_MASKED: Final = "tokens outside the grammar are masked: the rest is sampled from a renormalised distribution"
_SHIFTED: Final = "logits are shifted by tokens seen before: not the policy's distribution"
_CUT: Final = "the tail of the distribution is cut off"

RULES: Final[dict[str, Rule]] = {
    "top_p": Rule(_is(1), _CUT),
    "top_k": Rule(_is(-1, 0), _CUT),
    "min_p": Rule(_is(0), _CUT),
    "presence_penalty": Rule(_is(0), _SHIFTED),
    "frequency_penalty": Rule(_is(0), _SHIFTED),
    "repetition_penalty": Rule(_is(1), _SHIFTED),
    "logit_bias": Rule(_is_empty, "logits are shifted by the request"),
    "logits_processors": Rule(_is_empty, "logits are changed by code that the trainer does not run"),
    "vllm_xargs": Rule(_is_empty, "arguments of custom logits processors"),
    "thinking_token_budget": Rule(lambda _: False, "the end of thinking is forced, not sampled"),
    "allowed_token_ids": Rule(_is_empty, "all other tokens are masked"),
    "bad_words": Rule(_is_empty, "tokens are masked"),
    "min_tokens": Rule(_is(0), "the end of sequence is masked until then"),
    "ignore_eos": Rule(_is_false, "the reply goes on past the policy's own end"),
    "use_beam_search": Rule(_is_false, "beams are searched, not sampled"),
    "best_of": Rule(lambda _: False, "the best of several samples is no sample of the policy"),
    "response_format": Rule(_is_text_format, _MASKED),
    "structured_outputs": Rule(_is_empty, _MASKED),
    "guided_json": Rule(_is_empty, _MASKED),
    "guided_regex": Rule(_is_empty, _MASKED),
    "guided_choice": Rule(_is_empty, _MASKED),
    "guided_grammar": Rule(_is_empty, _MASKED),
    "structural_tag": Rule(_is_empty, _MASKED),
    "tool_choice": Rule(_is("auto", "none"), "a forced call is decoded under a grammar: " + _MASKED),
}
"""Field of a request → what a training call may say there. `temperature` is judged against the run's."""

TEMPERATURE_REASON: Final = "training samples at the run's temperature"

_REPORTED: Final = frozenset((
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "n", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
))  # fmt: skip
_INT64: Final = 1 << 63


def nonconforming(body: Json, temperature: float) -> list[str]:
    """Names of the fields of `body` that ask for other sampling than training assumes."""
    found = []
    for field, value in body.items():
        rule = RULES.get(field)
        if rule is not None:
            if value is not None and not rule.conforms(value):
                found.append(field)
        elif field == "temperature" and value is not None and not _is(temperature)(value):
            found.append(field)
    return found


def reason(field: str) -> str:
    return TEMPERATURE_REASON if field == "temperature" else RULES[field].reason


def enforce(body: Json, mode: str, temperature: float, dropped: list[str]) -> None:
    """Makes `body` sample as `mode` demands: what does not conform is dropped, the rest is set."""
    for field in dropped:
        del body[field]
    body["top_p"] = 1
    if mode != names.MODE_VALIDATION_GREEDY:
        body["temperature"] = temperature
        body["top_k"] = -1
    elif body.get("n") in (None, 1):
        body["temperature"] = 0
        body["top_k"] = -1
    else:  # servers refuse several greedy choices; the single best token at any temperature is the same choice
        body["temperature"] = 1
        body["top_k"] = 1


def reported(body: Json) -> Json:
    """What a call's record carries as its sampling: the numbers of the upstream request, and its stop texts."""
    found = {name: value for name, value in body.items() if name in _REPORTED and _recordable(value)}
    stop = body.get("stop")
    if isinstance(stop, str) or (isinstance(stop, list) and stop and all(isinstance(text, str) for text in stop)):
        found["stop"] = stop
    return found


def _recordable(value: Any) -> bool:
    """A number that fits an attribute; a model that is not trained may be asked for anything."""
    return type(value) is float or (type(value) is int and -_INT64 <= value < _INT64)
