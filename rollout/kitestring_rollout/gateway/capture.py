"""What is recorded of a reply, whole or streamed. Pure.

Shapes: vLLM's OpenAI routes. Chat: `prompt_token_ids` at the top of the reply, or of a stream's first chunk;
completions: inside the choice. `token_ids`, `logprobs` per choice, as deltas in a stream; `weight_versions` per choice,
in a stream on its last chunk, with offsets into the whole output.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kitestring_rollout.traces.records import (
    NO_IDS,
    NO_LOGPROBS,
    Api,
    CallRecord,
    ChoiceRecord,
    Json,
    Logprobs,
    TokenIds,
    VersionSpan,
)

MISSING_LOGPROB: Final = -9999.0
"""What vLLM reports where it has none."""

_INT32: Final = np.dtype(np.int32)
_FLOAT32: Final = np.dtype(np.float32)
_UNREADABLE: Final = (None,)
"""In place of a list that is none: what it is part of has no ids or logprobs then."""


class MalformedReply(ValueError):
    """The model server's reply is not of OpenAI's shape; the message says how."""


@dataclass(slots=True)
class Captured:
    """What a call's record needs of its reply."""

    prompt_token_ids: TokenIds
    choices: tuple[ChoiceRecord, ...]
    response_id: str | None


@dataclass(slots=True)
class _Choice:
    index: int
    ids: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    text: list[str] = field(default_factory=list)
    message: Json | None = None
    """Of a whole reply."""
    pieces: dict[str, list[str]] = field(default_factory=dict)
    """Of a stream: the message's texts by field."""
    tool_calls: dict[int, Json] = field(default_factory=dict)


class Capture:
    """Collects a reply: `whole` once, or `chunk` for each chunk of a stream; then `result`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._prompt_ids: Any = None
        self._choices: dict[int, _Choice] = {}
        self._usage: Json | None = None
        self._id: str | None = None

    def prompt(self, ids: TokenIds) -> None:
        """The prompt's ids, where they were cut out of the reply before it was parsed."""
        self._prompt_ids = ids

    def whole(self, reply: Json) -> None:
        self._head(reply)
        for raw in _choices_of(reply):
            choice = self._choice(raw)
            if self._api == "chat":
                message = raw.get("message")
                if not isinstance(message, dict):
                    raise MalformedReply("a choice has no message")
                _check_tool_calls(message.get("tool_calls"))
                choice.message = message
            else:
                choice.text.append(_text(raw.get("text")))

    def chunk(self, reply: Json) -> None:
        self._head(reply)
        for raw in _choices_of(reply):
            choice = self._choice(raw)
            if self._api == "chat":
                delta = raw.get("delta")
                if isinstance(delta, dict):
                    _merge_delta(choice, delta)
            else:
                choice.text.append(_text(raw.get("text")))

    def _head(self, reply: Json) -> None:
        if self._id is None and isinstance(reply.get("id"), str):
            self._id = reply["id"]
        ids = reply.get("prompt_token_ids")
        if ids is not None and self._prompt_ids is None:
            self._prompt_ids = ids
        usage = reply.get("usage")
        if isinstance(usage, dict):
            self._usage = usage

    def _choice(self, raw: Any) -> _Choice:
        if not isinstance(raw, dict) or type(raw.get("index", 0)) is not int:
            raise MalformedReply("a choice is not an object with an index")
        index = raw.get("index", 0)
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(index)
        choice.ids.extend(_numbers(raw.get("token_ids")))
        logprobs = raw.get("logprobs")
        if isinstance(logprobs, dict):
            if self._api == "chat":
                for item in _numbers(logprobs.get("content")):
                    choice.logprobs.append(item.get("logprob") if isinstance(item, dict) else None)
            else:
                choice.logprobs.extend(_numbers(logprobs.get("token_logprobs")))
        versions = raw.get("weight_versions")
        if versions:
            choice.versions = versions
        if self._prompt_ids is None:
            self._prompt_ids = raw.get("prompt_token_ids")
        reason = raw.get("finish_reason")
        if isinstance(reason, str):
            choice.finish_reason = reason
        return choice

    def tokens(self) -> tuple[int | None, int]:
        """Prompt tokens, when the server reports them or their ids, and completion tokens: as reported, else the ids
        seen so far, else the pieces of text."""
        usage = self._usage or {}
        prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
        if prompt is None and isinstance(self._prompt_ids, list | np.ndarray) and len(self._prompt_ids):
            prompt = len(self._prompt_ids)
        if completion is None:
            completion = sum(len(choice.ids) or _pieces(choice) for choice in self._choices.values())
        return prompt, completion

    def result(self, *, trained: bool, version: str | None) -> Captured:
        """`version`: policy version of the whole reply as its header says it, where the reply says none itself."""
        records = tuple(
            _choice_record(self._choices[index], self._api, trained=trained, version=version)
            for index in sorted(self._choices)
        )
        return Captured(
            prompt_token_ids=_ids(self._prompt_ids) if trained else NO_IDS,
            choices=records,
            response_id=self._id,
        )


def trainable(record: CallRecord) -> bool:
    """The prompt has ids, and every choice has ids, logprobs and versions."""
    return len(record.prompt_token_ids) > 0 and all(
        len(choice.token_ids) > 0 and len(choice.logprobs) == len(choice.token_ids) and len(choice.versions) > 0
        for choice in record.choices
    )


def _choices_of(reply: Json) -> list[Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list):
        raise MalformedReply("the reply has no list of choices")
    return choices


def _check_tool_calls(calls: Any) -> None:
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise MalformedReply("a message's tool_calls is no list of objects")


def _pieces(choice: _Choice) -> int:
    if choice.message is not None:
        return len(str(choice.message.get("content") or "")) // 4 + 1
    return len(choice.text) + sum(map(len, choice.pieces.values())) + len(choice.tool_calls)


def _merge_delta(choice: _Choice, delta: Json) -> None:
    for name, value in delta.items():
        if isinstance(value, str):
            choice.pieces.setdefault(name, []).append(value)
        elif name == "tool_calls" and isinstance(value, list):
            for part in value:
                if isinstance(part, dict):
                    _merge_tool_call(choice.tool_calls, part)


def _merge_tool_call(calls: dict[int, Json], part: Json) -> None:
    index = part.get("index")
    key = index if type(index) is int else len(calls)
    call = calls.setdefault(key, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    if isinstance(part.get("id"), str):
        call["id"] = part["id"]
    function = part.get("function")
    if isinstance(function, dict):
        for name in ("name", "arguments"):
            if isinstance(function.get(name), str):
                call["function"][name] += function[name]


def _choice_record(choice: _Choice, api: Api, *, trained: bool, version: str | None) -> ChoiceRecord:
    ids, logprobs = NO_IDS, NO_LOGPROBS
    versions: tuple[VersionSpan, ...] = ()
    if trained:
        ids = _ids(choice.ids)
        logprobs = _logprobs(choice.logprobs, len(ids))
        if len(ids):
            versions = _versions(choice.versions, len(ids), version)
    message = _message(choice) if api == "chat" else None
    return ChoiceRecord(
        index=choice.index,
        token_ids=ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice.finish_reason,
        message=message,
        text="".join(choice.text) if api == "completions" else None,
        tool_calls=len(message.get("tool_calls") or ()) if message is not None else 0,
    )


def _message(choice: _Choice) -> Json:
    if choice.message is not None:
        return choice.message
    message: Json = {name: "".join(pieces) for name, pieces in choice.pieces.items()}
    message["role"] = "assistant"
    if choice.tool_calls:
        message["tool_calls"] = [choice.tool_calls[index] for index in sorted(choice.tool_calls)]
    if not message.get("content"):
        message["content"] = None
    return message


def _numbers(values: Any) -> Sequence[Any]:
    """What a chunk adds to ids or logprobs: nothing where it has none, as a stream's last chunk may."""
    if values is None:
        return ()
    return values if isinstance(values, list) else _UNREADABLE


def _ids(values: Any) -> TokenIds:
    """int32 [T], or empty when a server reports anything else than token ids."""
    if isinstance(values, np.ndarray):
        return values
    if not values or not isinstance(values, list):
        return NO_IDS
    try:
        return np.frombuffer(array("i", values), _INT32)
    except (TypeError, OverflowError):
        return NO_IDS


def _logprobs(values: list[Any], length: int) -> Logprobs:
    """float32 [T], or empty when one is missing: a logprob is never made up."""
    if len(values) != length or not length:
        return NO_LOGPROBS
    try:
        found = np.frombuffer(array("f", values), _FLOAT32)
    except TypeError:
        return NO_LOGPROBS
    if min(values) <= MISSING_LOGPROB or not math.isfinite(sum(values)):
        return NO_LOGPROBS
    return found


def _versions(spans: Any, length: int, version: str | None) -> tuple[VersionSpan, ...]:
    """Gapless over 0..length, or empty: then the tokens' versions are unknown."""
    found = []
    position = 0
    for span in spans if isinstance(spans, list) else ():
        if not isinstance(span, dict):
            return ()
        name, start, end = span.get("version"), span.get("start"), span.get("end")
        if name is None or start != position or type(end) is not int or end < start:
            return ()
        if end > start:
            found.append(VersionSpan(str(name), start, end))
        position = end
    if found and position == length:
        return tuple(found)
    return (VersionSpan(version, 0, length),) if version and not spans else ()


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def spoken(record: CallRecord) -> str | None:
    """What the reply of a call says in words; None when it only calls tools."""
    if not record.choices:
        return None
    choice = record.choices[0]
    if choice.message is None:
        return choice.text
    content = choice.message.get("content")
    return content if isinstance(content, str) and content else None
