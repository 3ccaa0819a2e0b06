"""An agent's request → the request to the model server. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from kitestring_api import names
from kitestring_rollout.gateway import sampling
from kitestring_rollout.gateway.config import Sampling
from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.media import check_media
from kitestring_rollout.gateway.models import Model
from kitestring_rollout.traces.records import Api, Json

REFUSED: Final[dict[str, str]] = {
    "echo": "the reply would hold the prompt's tokens as well",
    "prompt_logprobs": "logprobs of prompts are not computed for agents",
    "prompt_embeds": "a prompt must be text or token ids, or it cannot be trained on",
    "kv_transfer_params": "it steers the model server, not the reply",
    "priority": "it steers the model server, not the reply",
    "request_id": "it steers the model server, not the reply",
    "cache_salt": "it steers the model server, not the reply",
    "mm_processor_kwargs": "it steers the model server, not the reply",
    "media_io_kwargs": "it steers the model server, not the reply",
}
"""Fields that a call to a trained policy may not carry, with the reason."""

TEMPLATE_VARIABLES_REFUSED: Final = frozenset((
    "chat_template", "messages", "conversation", "tools", "functions", "documents", "tokenize", "tokenizer",
    "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "return_generation_prompt", "tokenizer_kwargs", "processor_kwargs", "padding", "truncation", "max_length",
    "load_audio_from_video", "template",
))  # fmt: skip
"""What is no variable of a template: arguments of the functions that render it. A template is a program that the model
server runs: the model's own is run, an agent brings none."""

MAX_STOPS: Final = 4
"""As OpenAI's API has it. Servers look for each after every token."""
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKENS: Final = 128
MAX_N: Final = 128
TOKEN_FIELDS: Final[dict[Api, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
}
UNBOUNDED_TOKENS: Final = 1024
"""Set aside for each choice of a request that does not bound its reply."""
RECORD_DEPTH: Final = 8
"""A record may nest a message so much deeper than the request does."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a run says of every call."""

    sampling: Sampling
    media_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024


@dataclass(slots=True)
class Asked:
    """What the agent asked to see; the rest of what the gateway asks for is taken out of the reply."""

    logprobs: bool
    token_ids: bool
    weight_versions: bool
    usage: bool
    """A usage chunk in the stream."""

    @property
    def nothing(self) -> bool:
        return not (self.logprobs or self.token_ids or self.weight_versions)


@dataclass(slots=True)
class Prepared:
    """A request ready to be sent to a model's server, and what its record needs of it."""

    payload: bytes
    stream: bool
    asked: Asked
    sampling: Json
    nonconforming: tuple[str, ...]
    messages: tuple[Json, ...]
    tools: tuple[Json, ...] | None
    reserve: int
    """Completion tokens that its attempt's limits set aside for it."""


def read_body(raw: bytes) -> Json:
    """The request as an object; Refusal 400."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "invalid_json", f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "the request body must be a JSON object")
    return body


def prepare(body: Json, api: Api, model: Model, mode: str, rules: CallRules, *, room: int) -> Prepared:
    """Turns `body` (which it consumes) into the upstream request, which generates `room` tokens at most where the
    request bounds its reply or the model is frozen; Refusal 400 for what is not taken."""
    if "chat_template" in body or "chat_template_kwargs" in body:
        _check_template(body)
    if "stop" in body or "stop_token_ids" in body:
        _check_stops(body)
    messages = _messages(body, api)
    if api == "chat":
        check_media(body["messages"], rules.media_hosts)
    tools = _list_of_objects(body, "tools")
    stream = _flag(body, "stream")
    asked = Asked(
        logprobs=_given(body.get("logprobs")),
        token_ids=_flag(body, "return_token_ids"),
        weight_versions=_flag(body, "return_weight_versions"),
        usage=stream and _usage_asked(body),
    )
    n = body.get("n")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_N):
        raise Refusal(400, "invalid_request", f"n must be a number from 1 to {MAX_N}", param="n")
    corrected: tuple[str, ...] = ()
    if model.trained:
        corrected = _hold_to_rules(body, mode, rules.sampling)
        _cap_tokens(body, api, rules.sampling.max_tokens)
        if not asked.logprobs:
            body["logprobs"] = True if api == "chat" else 0
        body["return_token_ids"] = True
        body["return_weight_versions"] = True
    reserve = _hold_to_room(body, api, max(room, 1), trained=model.trained)
    if stream:
        options = body.get("stream_options")
        body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    body["model"] = model.served_name
    return Prepared(
        payload=_written(body),
        stream=stream,
        asked=asked,
        sampling=sampling.reported(body),
        nonconforming=corrected,
        messages=messages,
        tools=tools,
        reserve=reserve,
    )


def _written(body: Json) -> bytes:
    """JSON can be read deeper than it can be written: what neither the payload nor a record could hold is refused."""
    nested: Json | list[Json] = body
    for _ in range(RECORD_DEPTH):
        nested = [nested]  # type: ignore[list-item]
    try:
        return orjson.dumps(nested)[RECORD_DEPTH:-RECORD_DEPTH]
    except orjson.JSONEncodeError:
        raise Refusal(400, "invalid_json", "the request body is nested too deep") from None


def _check_template(body: Json) -> None:
    """Refuses whatever would make the model server render anything but the model's own template."""
    if body.get("chat_template") is not None:
        _refuse_template("chat_template")
    variables = body.get("chat_template_kwargs")
    if variables is None:
        return
    if not isinstance(variables, dict):
        raise Refusal(400, "invalid_request", "chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in variables:
        if name in TEMPLATE_VARIABLES_REFUSED:
            _refuse_template(f"chat_template_kwargs.{name}")


def _refuse_template(field: str) -> None:
    raise Refusal(
        400,
        "unsupported_parameter",
        f"{field[:128]} is not supported: the model's own chat template is used; leave it out",
        param=field.partition(".")[0],
    )


def _check_stops(body: Json) -> None:
    """A list that is none is the model server's to refuse."""
    stop = body.get("stop")
    texts = stop if isinstance(stop, list) else [stop]
    if len(texts) > MAX_STOPS or any(isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise Refusal(
            400, "invalid_request", f"stop: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters", param="stop"
        )
    ids = body.get("stop_token_ids")
    if isinstance(ids, list) and len(ids) > MAX_STOP_TOKENS:
        raise Refusal(
            400, "invalid_request", f"stop_token_ids: at most {MAX_STOP_TOKENS} token ids", param="stop_token_ids"
        )


def _messages(body: Json, api: Api) -> tuple[Json, ...]:
    """The prompt as messages, for the record."""
    if api == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise Refusal(400, "invalid_messages", "messages must be a list of at least one object", param="messages")
        return tuple(messages)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = body["prompt"] = prompt[0]
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return ()  # its ids are recorded
    raise Refusal(400, "invalid_prompt", "prompt must be one text or one list of token ids", param="prompt")


def _list_of_objects(body: Json, field: str) -> tuple[Json, ...] | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refusal(400, "invalid_request", f"{field} must be a list of objects", param=field)
    return tuple(value)


def _given(value: Any) -> bool:
    """0 is a value: of `logprobs` it asks for the sampled tokens' own."""
    return value is not None and value is not False


def _flag(body: Json, field: str) -> bool:
    value = body.get(field)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise Refusal(400, "invalid_request", f"{field} must be true or false", param=field)


def _usage_asked(body: Json) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _hold_to_rules(body: Json, mode: str, rules: Sampling) -> tuple[str, ...]:
    """Refuses or corrects what a trained policy's call may not ask; returns the names of what was corrected."""
    if not REFUSED.keys().isdisjoint(body):
        _refuse(body)
    if mode == names.MODE_TRY:
        return ()
    found = sampling.nonconforming(body, rules.temperature)
    if found and rules.nonconforming == "refuse":
        raise Refusal(
            400,
            "nonconforming_sampling",
            f"{found[0]}: {sampling.reason(found[0])} (the run sets `sampling.nonconforming: refuse`)",
            param=found[0],
        )
    sampling.enforce(body, mode, rules.temperature, found)
    return tuple(found)


def _refuse(body: Json) -> None:
    for field in REFUSED.keys() & body.keys():
        if _given(body[field]):
            raise Refusal(400, "unsupported_parameter", f"{field} is not supported: {REFUSED[field]}", param=field)
        del body[field]


def _cap_tokens(body: Json, api: Api, cap: int | None) -> None:
    if cap is not None and _lower_tokens(body, api, cap) is None:
        body[TOKEN_FIELDS[api][0]] = cap


def _lower_tokens(body: Json, api: Api, cap: int) -> int | None:
    """Lowers the bounds of a choice's tokens that a request gives to `cap`; the one that holds, None without any."""
    holds = None
    for field in TOKEN_FIELDS[api]:
        value = body.get(field)
        if value is None:
            continue
        if type(value) is not int:
            raise Refusal(400, "invalid_request", f"{field} must be a whole number", param=field)
        if value > cap:
            value = body[field] = cap
        holds = value if holds is None else min(holds, value)
    return holds


def _hold_to_room(body: Json, api: Api, room: int, *, trained: bool) -> int:
    """Bounds what a call may generate by `room`, the tokens left to its attempt; returns what is set aside for it.

    A reply that the request does not bound ends where the model's own context does: of a frozen model it is bounded
    once little is left (servers refuse a bound above what they could generate, which the gateway does not know)."""
    choices = body.get("n") or 1
    if not trained and type(body.get("best_of")) is int:
        choices = max(choices, body["best_of"])
    if choices > room:
        for field in ("n", "best_of"):
            if type(body.get(field)) is int:
                body[field] = min(body[field], room)
        choices = room
    each = room // choices
    holds = _lower_tokens(body, api, each)
    if holds is None:
        holds = min(each, UNBOUNDED_TOKENS)
        if not trained and each < UNBOUNDED_TOKENS:
            body[TOKEN_FIELDS[api][0]] = each
    return max(0, min(choices * holds, room))
