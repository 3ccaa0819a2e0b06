"""A tiny random Llama with a byte-level tokenizer and a ChatML template: an ordinary Hugging Face folder in a second."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools\\n' }}{% for t in tools %}{{ t.function.name + '(' + "
    "(t.function.parameters.properties.keys() | join(', ')) + ')' }}{% if not loop.last %}{{ ' ' }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}"
    '{%- for c in m.tool_calls or [] %}{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "48*3"}}</tool_call>'
MAX_MODEL_LEN = 256


def make_policy(folder: Path, *, seed: int = 0, chat_template: bool = True) -> Path:
    """Write the folder; heads of 32, which vLLM's CPU kernels know. The seed changes the weights, never the tokenizer."""
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
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
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
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        # Far from uniform, so that differences between two sets of weights are plain.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(generator_state)
    return folder
