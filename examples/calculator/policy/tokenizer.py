"""The tokenizer of the small policy: byte-level BPE in which every number up to 999 is one token, and ChatML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
# Part of what the model says: they must survive `skip_special_tokens=True`, so they are not special.
TOOL_MARKS = ("<tool_call>", "</tool_call>")
MARKS = (END_OF_TEXT, TURN_START, TURN_END, *TOOL_MARKS)
VOCABULARY = 1472
MAX_TOKENS = 512

# ChatML with calls in the Hermes format. The tool list is one short line: full JSON schemas would triple the prompt.
CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\\n' }}"
    "{%- for t in tools %}"
    "{{ t.function.name + '(' + (t.function.parameters.properties.keys() | join(', ')) + ')' }}"
    "{%- if not loop.last %}{{ ' ' }}{% endif %}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEMPLATE = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False).from_string(CHAT_TEMPLATE)


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
    """The text of a conversation, as the tokenizer's own `apply_chat_template` renders it."""
    return _TEMPLATE.render(messages=messages, tools=tools)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the word pieces on `texts`, without their digits, and add all numbers up to 999.

    Trained on the digits as well, the pieces would hold only the numbers that occur often enough.
    """
    numbers, number_merges = number_tokens()
    learned = _learn_pieces(texts, size=VOCABULARY - len(MARKS) - len(numbers) + 10)  # the ten digits are bytes already
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    digits = set("0123456789")
    tokens = [*MARKS, *(piece for piece in pieces if piece not in digits), *numbers]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in learned["merges"]] + number_merges
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS[:3]])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def number_tokens() -> tuple[list[str], list[tuple[str, str]]]:
    """The numbers 0..999 as text, and the merges that make each of them one token.

    Merges apply by rank: two-digit numbers in order first. So in a number of three digits the smaller of its two
    pairs is joined first (`821`: `21` before `82`), the left one of equals; a pair with a leading zero never is.
    """
    numbers = [str(number) for number in range(1000)]
    merges = [(number[0], number[1]) for number in numbers[10:100]]
    for number in numbers[100:]:
        left, right = number[:2], number[1:]
        left_first = right.startswith("0") or int(left) <= int(right)
        merges.append((left, number[2]) if left_first else (number[0], right))
    return numbers, merges


def _pre_tokenizer() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _learn_pieces(texts: Iterable[str], size: int) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    without_digits = str.maketrans("", "", "0123456789")
    tokenizer.train_from_iterator((_without_marks(text).translate(without_digits) for text in texts), trainer)
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    return state["model"]  # type: ignore[no-any-return]


def _without_marks(text: str) -> str:
    for mark in MARKS:
        text = text.replace(mark, "\n")
    return text


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save in the Hugging Face layout, under the class name that every version of transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
