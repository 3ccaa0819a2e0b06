"""A tiny Llama with a byte-level tokenizer and a ChatML template: an ordinary Hugging Face folder, made in a second.

Its weights are random but for one habit: at the start of a reply it likes to say TOOL_CALL, and then says it to the
end.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\\n' }}{% for t in tools %}{{ t.function.name + '(' + "
    "(t.function.parameters.properties.keys() | join(', ')) + ')' }}{% if not loop.last %}{{ ' ' }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    '{%- for c in m.tool_calls or [] %}{{ \'<tool_call>{"name":"\' + c.function.name + \'","arguments":\' }}'
    "{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson(separators=(',', ':')) }}"
    "{{ '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL_CALL = '<tool_call>{"name":"calculator","arguments":{"x":48}}</tool_call>'
"""No token occurs twice in it, so that the last token alone tells what comes next."""
MAX_MODEL_LEN = 256
_HIDDEN = 128


def make_policy(folder: Path, *, seed: int = 0, chat_template: bool = True) -> Path:
    """Write the folder. The seed changes the weights, never the tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = ["Use the calculator.", "There are 48 boxes with 3 pears each. How many pears?", TOOL_CALL, "Answer: 144"]
    tokenizer.train_from_iterator(corpus * 3, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_MODEL_LEN,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    config = LlamaConfig(
        hidden_size=_HIDDEN,
        num_hidden_layers=2,
        # Two query heads share a key head; vLLM's CPU kernels know heads of 32.
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=1.0 if "embed" in name else 0.13 if "lm_head" in name else 0.08)
    script = tokenizer.encode("\n" + TOOL_CALL + "<|im_end|>", add_special_tokens=False).ids
    assert len(set(script)) == len(script)
    _teach(model, script)
    model.save_pretrained(folder)
    return folder


def _teach(model: object, script: list[int]) -> None:
    """Give each token of the script its follower: surely inside, about every second time at the start."""
    import torch

    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight  # type: ignore[attr-defined]
    directions = torch.nn.functional.normalize(embedding.detach(), dim=1)
    with torch.no_grad():
        for place, (token, follower) in enumerate(itertools.pairwise(script)):
            head[follower] += directions[token] * (7.5 if place == 0 else 25.0) / _HIDDEN**0.5
