"""What the agent sees of a reply: not what only the gateway asked for. Pure."""

from __future__ import annotations

from typing import Final

from kitestring_rollout.gateway.request import Asked
from kitestring_rollout.traces.records import Json

_INTERNAL: Final = ("prompt_token_ids", "prompt_logprobs", "prompt_text", "kv_transfer_params")


def strip_whole(reply: Json, asked: Asked, model: str) -> None:
    """Takes out of a reply what only the gateway asked for, and names the model as the agent did."""
    _strip_head(reply, asked, model)
    for choice in reply["choices"]:
        _strip_choice(choice, asked, absent=False)


def strip_chunk(chunk: Json, asked: Asked, model: str) -> bool:
    """The same for a chunk of a stream; False when nothing is left that the agent is to see."""
    _strip_head(chunk, asked, model)
    choices = chunk.get("choices")
    if not asked.usage:
        usage = chunk.pop("usage", None)
        if not choices and usage is not None:
            return False
    if not choices:
        return True
    seen = chunk.get("usage") is not None or asked.token_ids
    for choice in choices:
        held_back = not _says_something(choice)
        _strip_choice(choice, asked, absent=True)
        seen = seen or not held_back
    return seen


def _strip_head(reply: Json, asked: Asked, model: str) -> None:
    reply["model"] = model
    for name in _INTERNAL:
        if name in reply and not (name == "prompt_token_ids" and asked.token_ids):
            del reply[name]


def _strip_choice(choice: Json, asked: Asked, *, absent: bool) -> None:
    if not asked.logprobs and "logprobs" in choice:
        if absent:
            del choice["logprobs"]
        else:
            choice["logprobs"] = None
    if not asked.token_ids:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
    if not asked.weight_versions:
        choice.pop("weight_versions", None)
    choice.pop("prompt_logprobs", None)
    choice.pop("routed_experts", None)


def _says_something(choice: Json) -> bool:
    """Whether a streamed choice holds more than ids and logprobs: servers send such chunks while a parser holds the
    text back."""
    if choice.get("finish_reason") is not None or choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value not in (None, "", []) for value in delta.values())
