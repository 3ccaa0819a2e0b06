"""Requests of both generation routes, checked field by field: what cannot be done is refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from random import Random
from typing import Any, Literal

from kitestring_trainer.policy_server.detokenize import TextStream
from kitestring_trainer.policy_server.errors import RequestRefused, shown
from kitestring_trainer.policy_server.sampling import Sampling
from kitestring_trainer.policy_server.sequence import GeneratedSequence
from kitestring_trainer.policy_server.tokenizer import ServedTokenizer, template_messages

Body = Mapping[str, Any]

MAX_ALTERNATIVES = 20
MAX_STOPS = 16
"""Each is looked for after every token, in the thread that all sequences share."""
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_CHOICES = 128
MAX_CHARACTERS_PER_TOKEN = 256
"""No tokenizer has longer tokens: a text of more characters per token of the context is refused unread."""
_GREEDY_BELOW = 1e-5
"""Temperatures below this are 0, as in vLLM."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields this server cannot carry out -> values, besides null, that ask for nothing."""


@dataclass(frozen=True)
class GenerationRequest:
    """One checked request."""

    api: Literal["chat", "completions"]
    prompts: list[list[int]]
    """Token ids; a chat has one prompt."""
    max_tokens: list[int]
    """Per prompt."""
    n: int
    sampling: Sampling
    logprobs: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    skip_special_tokens: bool
    seed: int | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_weight_versions: bool
    read_tool_calls: bool
    parallel_tool_calls: bool

    def sequences(
        self, tokenizer: ServedTokenizer, fallback_seed: str, notify: Callable[[], None]
    ) -> list[GeneratedSequence]:
        """The sequences to generate: n for each prompt, in order of their choice index.

        Each draws its noise from a generator of its own, seeded by the request's seed (else `fallback_seed`) and its
        choice index.
        """
        stop_tokens: dict[int, int | None] = {token: token for token in self.stop_token_ids}
        if not self.ignore_eos:
            stop_tokens.update(dict.fromkeys(tokenizer.end_tokens))
        seed = fallback_seed if self.seed is None else f"seed {self.seed}"
        result: list[GeneratedSequence] = []
        for prompt, max_tokens in zip(self.prompts, self.max_tokens, strict=True):
            for _ in range(self.n):
                index = len(result)
                text = None
                if self.stream or self.stop:
                    text = TextStream(tokenizer.fast, skip_special_tokens=self.skip_special_tokens, stop=self.stop)
                sequence = GeneratedSequence(
                    prompt=prompt,
                    sampling=self.sampling,
                    noise=Random(f"{seed} choice {index}"),  # noqa: S311 - sampling, not secrecy
                    max_tokens=max_tokens,
                    stop_tokens=stop_tokens,
                    text=text,
                    notify=notify,
                    live=self.stream,
                    index=index,
                )
                result.append(sequence)
        return result


@dataclass(frozen=True)
class Served:
    """What requests are checked against."""

    model_name: str
    max_model_len: int
    vocabulary: int
    tokenizer: ServedTokenizer
    tool_parser: str | None


def chat_request(body: Body, served: Served) -> GenerationRequest:
    """Check a body of POST /v1/chat/completions. Raises RequestRefused."""
    _check_common(body, served)
    tools = _tools(body, served)
    template_variables = body.get("chat_template_kwargs")
    if template_variables is None:
        template_variables = {}
    if not isinstance(template_variables, dict):
        raise RequestRefused("chat_template_kwargs must be an object", param="chat_template_kwargs")
    messages = template_messages(body.get("messages"))
    if len(messages) > served.max_model_len:
        raise RequestRefused(
            f"This model's maximum context length is {served.max_model_len} tokens, which {len(messages)} messages "
            "cannot fit.",
            param="messages",
        )
    prompt = served.tokenizer.chat_prompt(
        messages,
        tools,
        add_generation_prompt=_flag(body, "add_generation_prompt", default=True),
        variables=template_variables,
        max_characters=MAX_CHARACTERS_PER_TOKEN * served.max_model_len,
    )
    logprobs = _flag(body, "logprobs", default=False)
    alternatives = _integer(body, "top_logprobs", 0, MAX_ALTERNATIVES) or 0
    if alternatives and not logprobs:
        raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
    limit_name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    reads_tools = tools is not None and body.get("tool_choice") != "none"
    return _request(
        body,
        served,
        api="chat",
        prompts=[prompt],
        limit_name=limit_name,
        default_limit=None,
        logprobs=logprobs,
        alternatives=alternatives,
        read_tool_calls=reads_tools,
    )


def completion_request(body: Body, served: Served) -> GenerationRequest:
    """Check a body of POST /v1/completions. Raises RequestRefused."""
    _check_common(body, served)
    asked = _integer(body, "logprobs", 0, MAX_ALTERNATIVES)
    return _request(
        body,
        served,
        api="completions",
        prompts=_prompts(body, served),
        limit_name="max_tokens",
        default_limit=16,
        logprobs=asked is not None,
        alternatives=asked or 0,
        read_tool_calls=False,
    )


def _check_common(body: Body, served: Served) -> None:
    model = body.get("model")
    if model is not None and model != served.model_name:
        raise RequestRefused(f"The model {shown(model)} does not exist.", status=HTTPStatus.NOT_FOUND, param="model")
    for name in body.keys() & _UNSUPPORTED.keys():
        value = body[name]
        if value is not None and value not in _UNSUPPORTED[name]:
            raise RequestRefused(f"{name} is not supported by this server; leave it out", param=name)


def _request(
    body: Body,
    served: Served,
    *,
    api: Literal["chat", "completions"],
    prompts: list[list[int]],
    limit_name: str,
    default_limit: int | None,
    logprobs: bool,
    alternatives: int,
    read_tool_calls: bool,
) -> GenerationRequest:
    temperature = _number(body, "temperature", 1.0, 0.0, 100.0)
    if temperature < _GREEDY_BELOW:
        temperature = 0.0
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise RequestRefused("top_p must be above 0 and at most 1", param="top_p")
    top_k = _integer(body, "top_k", -1, 2**31) or 0
    n = _integer(body, "n", 1, MAX_CHOICES) or 1
    if n > 1 and temperature == 0.0:
        raise RequestRefused("n must be 1 at temperature 0: all choices would be equal", param="n")
    limit = _integer(body, limit_name, 1, 2**31)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestRefused("stream_options must be an object", param="stream_options")
    if options.get("continuous_usage_stats"):
        raise RequestRefused("stream_options.continuous_usage_stats is not supported", param="stream_options")
    stream = _flag(body, "stream", default=False)
    if options and not stream:
        raise RequestRefused("stream_options needs stream: true", param="stream_options")
    return GenerationRequest(
        api=api,
        prompts=prompts,
        max_tokens=[_room(prompt, limit or default_limit, served) for prompt in prompts],
        n=n,
        sampling=Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=0 if top_k >= served.vocabulary else max(top_k, 0),
            alternatives=min(alternatives, served.vocabulary),
        ),
        logprobs=logprobs,
        stop=_stop(body),
        stop_token_ids=_stop_token_ids(body),
        ignore_eos=_flag(body, "ignore_eos", default=False),
        # The tags of tool calls are special tokens in some tokenizers.
        skip_special_tokens=_flag(body, "skip_special_tokens", default=True) and not read_tool_calls,
        seed=_integer(body, "seed", -(2**63), 2**63),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        return_token_ids=_flag(body, "return_token_ids", default=False),
        return_weight_versions=_flag(body, "return_weight_versions", default=False),
        read_tool_calls=read_tool_calls,
        parallel_tool_calls=_flag(body, "parallel_tool_calls", default=True),
    )


def _room(prompt: list[int], limit: int | None, served: Served) -> int:
    """Tokens to generate at most: what was asked for, or what the context has left if that is less, as in vLLM.

    Refuses a prompt that leaves no room, and a limit that no prompt could leave room for.
    """
    most = served.max_model_len
    if not prompt:
        raise RequestRefused("the prompt is empty", param="prompt")
    if len(prompt) >= most:
        raise RequestRefused(
            f"This model's maximum context length is {most} tokens. However, your prompt contains {len(prompt)} input "
            "tokens, which leaves no room for output. Please reduce the length of the input prompt.",
            param="input_tokens",
        )
    if limit is not None and limit > most:
        raise RequestRefused(
            f"This model's maximum context length is {most} tokens. However, you requested {limit} output tokens.",
            param="max_tokens",
        )
    room = most - len(prompt)
    return room if limit is None else min(limit, room)


def _prompts(body: Body, served: Served) -> list[list[int]]:
    prompt = body.get("prompt")
    entries = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    special = _flag(body, "add_special_tokens", default=True)
    result = []
    for entry in entries:
        if isinstance(entry, str):
            if len(entry) > MAX_CHARACTERS_PER_TOKEN * served.max_model_len:
                raise RequestRefused(
                    f"This model's maximum context length is {served.max_model_len} tokens, which a text of "
                    f"{len(entry)} characters cannot fit.",
                    param="prompt",
                )
            result.append(served.tokenizer.encode(entry, add_special_tokens=special))
        elif isinstance(entry, list) and all(type(token) is int for token in entry):
            for token in entry:
                if not 0 <= token < served.vocabulary:
                    raise RequestRefused(
                        f"prompt holds token id {token}; the model has ids 0 to {served.vocabulary - 1}", param="prompt"
                    )
            result.append(entry)
        else:
            raise RequestRefused("prompt must be text, a list of token ids, or a list of such", param="prompt")
    return result


def _tools(body: Body, served: Served) -> list[dict[str, Any] | Callable[..., Any]] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools:
        if choice not in (None, "none"):
            raise RequestRefused("tool_choice needs tools", param="tool_choice")
        return None
    if not isinstance(tools, list):
        raise RequestRefused("tools must be a list", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(
                f'tools[{place}] must be {{"type": "function", "function": {{"name": …}}}}', param=f"tools[{place}]"
            )
    if choice not in (None, "auto", "none"):
        raise RequestRefused(
            'tool_choice must be "auto" or "none": this server cannot force a call', param="tool_choice"
        )
    if choice != "none" and served.tool_parser is None:
        raise RequestRefused(
            "this server was started without a tool parser (toolParser of the policy), so it cannot read tool calls",
            param="tools",
        )
    return tools


def _stop(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestRefused("stop must be text or a list of texts, none empty", param="stop")
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARACTERS for text in texts):
        raise RequestRefused(f"stop: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters", param="stop")
    return tuple(texts)


def _stop_token_ids(body: Body) -> tuple[int, ...]:
    tokens = body.get("stop_token_ids") or []
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise RequestRefused("stop_token_ids must be a list of token ids", param="stop_token_ids")
    if len(tokens) > MAX_STOP_TOKENS:
        raise RequestRefused(f"stop_token_ids: at most {MAX_STOP_TOKENS} token ids", param="stop_token_ids")
    return tuple(tokens)


def _flag(body: Body, name: str, *, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestRefused(f"{name} must be true or false, not {shown(value)}", param=name)
    return value


def _integer(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise RequestRefused(f"{name} must be a whole number from {low} to {high}, not {shown(value)}", param=name)
    return value


def _number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestRefused(f"{name} must be a number from {low:g} to {high:g}, not {shown(value)}", param=name)
    return float(value)
