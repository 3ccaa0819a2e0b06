"""The model of the small policy and its warm start (imports torch and transformers)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from agent import TOOLS
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from policy.recipe import Recipe
from policy.tokenizer import MAX_TOKENS, TURN_START, render, save_tokenizer, train_tokenizer
from policy.transcripts import Message, draw_conversation

TOKENIZER_TEXTS = 2000
# The loss of a batch is a sum over tokens divided by a constant. Divided by their number, conversations without a
# tool call, which are short, would weigh too much.
TOKENS_PER_CONVERSATION = 25
IGNORED = -100

Report = Callable[[int, float], None]
"""Called after each step with its number, counted from 1, and its loss."""


def make_policy(folder: Path, recipe: Recipe, report: Report) -> None:
    """Write tokenizer and warm-started model to `folder` as an ordinary Hugging Face folder.

    The same recipe gives the same bytes on the same machine.
    """
    torch.set_num_threads(recipe.threads)
    rng = random.Random(f"warm start {recipe.variant} {recipe.seed}")
    tokenizer = make_tokenizer(recipe, rng)
    model = new_model(tokenizer, recipe.seed)
    train(model, tokenizer, recipe, rng, report)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone; the rest of the folder is not
    save_tokenizer(tokenizer, folder)


def make_tokenizer(recipe: Recipe, rng: random.Random) -> PreTrainedTokenizerFast:
    return train_tokenizer(
        render(draw_conversation(rng, recipe.variant, flawed=False), TOOLS) for _ in range(TOKENIZER_TEXTS)
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.25 M parameters whose attention starts out as a copier.

    Copying numbers is what takes a small model longest to find. With `o_proj` the transpose of an orthogonal `v_proj`,
    attending to a token copies it. Heads have 32 dimensions, which every attention kernel has.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.64 / math.sqrt(config.hidden_size))
        model.model.embed_tokens.weight.normal_(0.0, 0.05)
        for layer in model.model.layers:
            torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight)
            layer.self_attn.o_proj.weight.copy_(layer.self_attn.v_proj.weight.T)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    rng: random.Random,
    report: Report,
) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )
    for step in range(recipe.steps):
        conversations = [draw_conversation(rng, recipe.variant, recipe.flawed(step)) for _ in range(recipe.batch)]
        inputs, targets = batch(tokenizer, conversations)
        loss = loss_sum(model, inputs, targets) / (recipe.batch * TOKENS_PER_CONVERSATION)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
        report(step + 1, loss.item())


def batch(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[list[Message]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T-1], padded on the right, and targets [B, T-1]: `IGNORED` unless the assistant says the token."""
    texts = [render(messages, TOOLS) for messages in conversations]
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    header: list[int] = tokenizer.encode(f"{TURN_START}assistant\n", add_special_tokens=False)
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), int(tokenizer.pad_token_id))
    targets = torch.full((len(rows), width), IGNORED)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        for start, end in assistant_spans(row, header, int(tokenizer.eos_token_id)):
            targets[index, start:end] = ids[index, start:end]
    return ids[:, :-1], targets[:, 1:]


def assistant_spans(ids: Sequence[int], header: Sequence[int], turn_end: int) -> list[tuple[int, int]]:
    """Half-open spans of what the assistant says: after each header, up to and with the end of the turn."""
    spans = []
    position = 0
    while position <= len(ids) - len(header):
        if list(ids[position : position + len(header)]) == list(header):
            start = position + len(header)
            end = list(ids).index(turn_end, start) + 1
            spans.append((start, end))
            position = end
        else:
            position += 1
    return spans


def loss_sum(model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy of the targets. Padding lies to the right, so causal attention needs no further mask."""
    wanted = targets != IGNORED
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted], reduction="sum")
