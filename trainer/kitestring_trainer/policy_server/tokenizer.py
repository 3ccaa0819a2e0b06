"""Text to tokens and back: the chat template, prompts, and the text of single tokens."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer  # type: ignore[import-untyped]
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from kitestring_trainer.policy_server.errors import PolicyServerError, RequestRefused, shown

_ARGUMENTS = (
    frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    | frozenset(inspect.signature(render_jinja_template).parameters)
    | {"messages"}
)
"""What is no variable of a template but an argument of the functions that render it: `chat_template` among them, by
which a request would run a program of its own in this process."""


class ServedTokenizer:
    """The tokenizer of a model folder. Prompts may be made in several threads: nothing here sets the
    tokenizer's padding or truncation, the state that threads would share."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.fast: Tokenizer = tokenizer.backend_tokenizer
        self.end_tokens = end_tokens
        """Tokens that end a reply: those of the tokenizer, the model's config and its generation config."""
        self._pieces: dict[int, tuple[str, list[int]]] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become special tokens."""
        return list(self.fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens; broken characters become replacement characters."""
        return str(self.fast.decode(tokens, skip_special_tokens=skip_special_tokens))

    def piece(self, token: int) -> tuple[str, list[int]]:
        """(text, its UTF-8 bytes) of one token by itself, special or not."""
        found = self._pieces.get(token)
        if found is None:
            text = self.decode([token], skip_special_tokens=False)
            found = self._pieces[token] = (text, list(text.encode()))
        return found

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any] | Callable[..., Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        max_characters: int,
    ) -> list[int]:
        """Token ids of a conversation (see `template_messages`), whose text may have `max_characters`.

        Raises RequestRefused when the template cannot take it.
        """
        for name in variables:
            if name in _ARGUMENTS:
                raise RequestRefused(
                    f"chat_template_kwargs.{name} is not supported: the model's own chat template is used; leave it "
                    "out",
                    param="chat_template_kwargs",
                )
        if not self.has_chat_template:
            raise RequestRefused(
                "the served model's tokenizer has no chat template: add chat_template to its tokenizer_config.json "
                "(or a chat_template.jinja beside it), or use /v1/completions",
                param="messages",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
            )
            text = str(text)
            text.encode()  # a lone surrogate has no tokens
        except Exception as error:
            # The template is the model's, a program that may raise anything; what it fails on is this request.
            raise RequestRefused(
                f"the model's chat template fails on these messages: {type(error).__name__}: {str(error)[:500]}",
                param="messages",
            ) from error
        if len(text) > max_characters:
            raise RequestRefused(
                f"the messages are too long for the model's context: {len(text)} characters", param="messages"
            )
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> ServedTokenizer:
    """Load the tokenizer of a model folder. Raises PolicyServerError when there is none or it is not a fast one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        raise PolicyServerError(f"model folder {folder} has no tokenizer that loads: {why}") from error
    if not tokenizer.is_fast:
        raise PolicyServerError(f"model folder {folder} has no tokenizer.json, which the CPU policy server needs")
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:  # Generation settings are optional in a model folder.
        generation = None
    ends: set[int] = set()
    for found in (tokenizer.eos_token_id, config.eos_token_id, generation):
        ends.update(found if isinstance(found, list) else [found] if found is not None else [])
    return ServedTokenizer(tokenizer, frozenset(ends))


def template_messages(messages: object) -> list[dict[str, Any]]:
    """Check OpenAI messages and bring them into the form that chat templates expect, as vLLM does.

    Text parts are joined by newlines; arguments of tool calls become objects (what is no JSON object becomes an empty
    one). Raises RequestRefused for anything but text.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    result = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestRefused(f"{where} must be an object with a role", param=where)
        clean = {key: value for key, value in message.items() if value is not None}
        clean["content"] = _content(message.get("content"), where)
        if message["role"] == "assistant":
            clean.pop("tool_calls", None)
            if calls := message.get("tool_calls"):
                clean["tool_calls"] = _tool_calls(calls, where)
        result.append(clean)
    return result


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{where}.content must be text or a list of parts", param=where)
    texts = []
    for part in content:
        text = part if isinstance(part, str) else None
        if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
            text = part.get("text")
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestRefused(
                f"{where}.content holds a part of type {shown(kind)}; this server takes text only", param=where
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestRefused(f"{where}.tool_calls must be a list", param=where)
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"{where}.tool_calls: each must be an object with function.name", param=where)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments.encode()
                arguments = json.loads(arguments)
                json.dumps(arguments, ensure_ascii=False).encode()  # lone surrogates: no template can spell them
            except (ValueError, RecursionError):
                # It stands in the conversation for good: refusing it would refuse every further turn.
                arguments = {}
        if not isinstance(arguments, dict):
            arguments = {}
        result.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return result
