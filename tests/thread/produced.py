"""What a policy server produced, read from the bytes of its replies; and rows of an export in the same form. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.thread.recorder import Exchange


@dataclass(frozen=True)
class Produced:
    """A choice. Logprobs as the bytes of their float32 values, so that equal means bit for bit."""

    choice: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: bytes
    versions: tuple[tuple[str, int, int], ...]
    finish_reason: str | None


def produced(exchange: Exchange) -> list[Produced]:
    """The choices of a reply in the order of their index, as far as it came."""
    found: dict[int, dict[str, Any]] = {}
    prompt: list[int] = []
    for part in _parts(exchange):
        prompt = prompt or part.get("prompt_token_ids") or []
        for choice in part["choices"]:
            entry = found.setdefault(choice["index"], {"ids": [], "logprobs": [], "versions": [], "reason": None})
            prompt = prompt or choice.get("prompt_token_ids") or []
            entry["ids"] += choice.get("token_ids") or []
            entry["logprobs"] += _logprobs(choice.get("logprobs") or {})
            entry["versions"] = choice.get("weight_versions") or entry["versions"]
            entry["reason"] = choice["finish_reason"] or entry["reason"]
    return [
        Produced(
            index,
            tuple(prompt),
            tuple(entry["ids"]),
            bits(entry["logprobs"]),
            _versions(entry["versions"]),
            entry["reason"],
        )
        for index, entry in sorted(found.items())
    ]


def exported(row: Mapping[str, Any]) -> Produced:
    """A row of an export."""
    return Produced(
        row["choice"],
        tuple(row["prompt_token_ids"]),
        tuple(row["response_token_ids"]),
        bits(row["response_logprobs"]),
        _versions(row["policy_versions"]),
        row["finish_reason"],
    )


def bits(logprobs: Sequence[float]) -> bytes:
    """Float32 of values that are float32 already: none may be rounded on the way."""
    values = np.asarray(logprobs, np.float64)
    single = values.astype(np.float32)
    assert np.array_equal(single.astype(np.float64), values), "a log-probability is no float32"
    return single.tobytes()


def begins(part: Produced, whole: Produced) -> bool:
    """Whether `part` is the beginning of `whole`, token by token."""
    return (
        part.prompt == whole.prompt
        and part.response == whole.response[: len(part.response)]
        and part.logprobs == whole.logprobs[: len(part.logprobs)]
        and len(part.logprobs) == 4 * len(part.response)
    )


def _parts(exchange: Exchange) -> Iterator[dict[str, Any]]:
    if not exchange.request.get("stream"):
        yield json.loads(exchange.body)
        return
    for event in exchange.body.decode().split("\n\n"):
        if event.startswith("data: {"):
            yield json.loads(event.removeprefix("data: "))


def _logprobs(logprobs: Mapping[str, Any]) -> list[float]:
    """Of chat, or of completions."""
    if "content" in logprobs:
        return [item["logprob"] for item in logprobs["content"]]
    return list(logprobs.get("token_logprobs", ()))


def _versions(spans: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int, int], ...]:
    return tuple((span["version"], span["start"], span["end"]) for span in spans if span["end"] > span["start"])
