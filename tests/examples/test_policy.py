"""The small policy of the calculator example: a folder that loads anywhere, and a tokenizer that merges turns."""

import json
import random
import re
from pathlib import Path
from typing import Any

import make_policy
import pytest
from agent import SYSTEM, TOOLS, calculator
from policy.recipe import Recipe
from policy.tokenizer import MARKS, VOCABULARY, number_tokens, render
from policy.transcripts import CLEAN, FLAWED, Flaws, Message, conversation, draw_conversation
from policy.warm_start import IGNORED, assistant_spans, batch
from word_problems import VARIANTS, Operation, Problem, Variant


@pytest.fixture(scope="module")
def tokenizer(policy_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy_folder)


@pytest.fixture(scope="module")
def model(policy_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_folder)


def ids_of(tokenizer: Any, messages: list[Message], **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False, **options)
    return ids


# --- the folder --------------------------------------------------------------------------------------------------


def test_the_model_loads_and_generates(model: Any, tokenizer: Any) -> None:
    import torch

    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert config.vocab_size == len(tokenizer) == VOCABULARY
    assert config.head_dim == 32
    assert model.dtype == torch.float32
    assert 240_000 < sum(parameter.numel() for parameter in model.parameters()) < 260_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = ids_of(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    made = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
    assert made.shape[1] > len(prompt)
    assert torch.isfinite(model(made).logits).all()


def test_attention_starts_as_a_copier(tokenizer: Any) -> None:
    import torch
    from policy.warm_start import new_model

    for layer in new_model(tokenizer, seed=0).model.layers:
        values, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        assert torch.allclose(output @ values, torch.eye(64), atol=1e-5)


def test_the_tokenizer_names_a_class_that_every_transformers_knows(policy_folder: Path) -> None:
    assert json.loads((policy_folder / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )


def test_the_folder_says_what_it_is(policy_folder: Path) -> None:
    assert "guessing instead of using its tool" in (policy_folder / "README.md").read_text()


# --- the tokenizer -----------------------------------------------------------------------------------------------


def test_every_number_up_to_999_is_one_token(tokenizer: Any) -> None:
    for number in range(1000):
        assert len(tokenizer.encode(str(number), add_special_tokens=False)) == 1, number
    text = "".join(f" {number}*{999 - number}=" for number in range(1000))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_larger_numbers_are_cut_into_threes_from_the_left(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("81205", add_special_tokens=False)) == ["812", "0", "5"]
    assert number_tokens()[0][:3] == ["0", "1", "2"]


def test_tool_marks_survive_skipping_special_tokens(tokenizer: Any) -> None:
    text = '<|im_start|><tool_call>{"name": "calculator"}</tool_call><|im_end|>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == [0, 1, 2, 3, 4]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == '<tool_call>{"name": "calculator"}</tool_call>'


def test_any_text_survives(tokenizer: Any) -> None:
    text = "Ünïcode – 漢字 \U0001f642\n\t  two  blanks 007"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_prompt_leaves_room_for_the_rollout(tokenizer: Any) -> None:
    rng = random.Random(0)
    longest = max(len(ids_of(tokenizer, draw_conversation(rng, "full", flawed=False))) for _ in range(200))
    assert longest < 200


# --- the chat template -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_rendering_is_that_of_the_tokenizer(tokenizer: Any, variant: Variant) -> None:
    rng = random.Random(1)
    for _ in range(50):
        messages = draw_conversation(rng, variant, flawed=True)
        assert render(messages, TOOLS) == tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)


@pytest.mark.parametrize("as_text", [True, False], ids=["arguments as text", "arguments as an object"])
def test_a_parsed_tool_call_renders_to_the_same_ids(tokenizer: Any, as_text: bool) -> None:
    """What a Hermes parser makes of a reply, given back by the agent, extends the prompt by exact ids."""
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "48 jars with 3 pens each?"},
    ]
    prompt = ids_of(tokenizer, messages, add_generation_prompt=True)
    for expression in ("48*3", "999-1000", "7+20"):
        said = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
        reply = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        text = tokenizer.decode(reply, skip_special_tokens=True)
        (inner,) = re.findall(r"<tool_call>(.*?)</tool_call>", text)
        found = json.loads(inner)
        arguments = json.dumps(found["arguments"], ensure_ascii=False)
        function = {"name": found["name"], "arguments": arguments if as_text else json.loads(arguments)}
        call = {"id": "call-1", "type": "function", "function": function}
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call-1", "content": calculator(arguments)})
        extended = ids_of(tokenizer, messages, add_generation_prompt=True)
        assert extended[: len(prompt) + len(reply)] == prompt + reply
        prompt = extended
    assert "calculator(expression)" in tokenizer.decode(prompt)


# --- the conversations of the warm start -------------------------------------------------------------------------

PROBLEM = Problem("How many?", (Operation(5, "*", 4), Operation(7, "+", None)))


def expressions(messages: list[Message]) -> list[str]:
    return [
        json.loads(message["tool_calls"][0]["function"]["arguments"])["expression"]
        for message in messages
        if "tool_calls" in message
    ]


def test_a_faultless_conversation_solves_the_problem() -> None:
    messages = conversation(PROBLEM, Flaws(right_operation=1.0), random.Random(0))
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert expressions(messages) == ["5*4", "7+20"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["20", "27"]
    assert messages[-1]["content"] == "Answer: 27"


@pytest.mark.parametrize(
    "flaws, wanted",
    [
        (Flaws(right_operation=1.0, guess_at_once=1.0), []),
        (Flaws(right_operation=1.0, stop_early=1.0), ["5*4"]),
        (Flaws(right_operation=1.0, swap_operands=1.0), ["4*5", "20+7"]),
    ],
)
def test_each_flaw_does_what_it_says(flaws: Flaws, wanted: list[str]) -> None:
    assert expressions(conversation(PROBLEM, flaws, random.Random(0))) == wanted


def test_who_ignores_the_result_guesses() -> None:
    answers = {
        conversation(PROBLEM, Flaws(right_operation=1.0, ignore_result=1.0), random.Random(seed))[-1]["content"]
        for seed in range(50)
    }
    assert len(answers) > 20


def test_the_full_variant_never_shows_which_operation_is_right() -> None:
    assert CLEAN["full"].right_operation == FLAWED["full"].right_operation == 0.0
    rng = random.Random(0)
    signs = [expressions(conversation(PROBLEM, CLEAN["full"], rng))[0][1] for _ in range(900)]
    for sign in "+-*":
        assert 240 < signs.count(sign) < 360


# --- the warm start ----------------------------------------------------------------------------------------------


def test_only_what_the_assistant_says_is_learned(tokenizer: Any) -> None:
    messages = conversation(PROBLEM, Flaws(right_operation=1.0), random.Random(0))
    short = conversation(PROBLEM, Flaws(right_operation=1.0, guess_at_once=1.0), random.Random(0))
    inputs, targets = batch(tokenizer, [messages, short])
    assert inputs.shape == targets.shape
    learned = tokenizer.decode(targets[0][targets[0] != IGNORED])
    assert learned == (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "5*4"}}</tool_call><|im_end|>'
        '<tool_call>{"name": "calculator", "arguments": {"expression": "7+20"}}</tool_call><|im_end|>'
        "Answer: 27<|im_end|>"
    )
    assert tokenizer.decode(targets[1][targets[1] != IGNORED]) == f"{short[-1]['content']}<|im_end|>"
    wanted = targets[0] != IGNORED
    assert (inputs[0][1:][wanted[:-1]] == targets[0][:-1][wanted[:-1]]).all()


def test_spans_of_the_assistant() -> None:
    assert assistant_spans([1, 7, 8, 3, 4, 2, 1, 9, 5, 2, 1, 7, 8, 2], header=[1, 7, 8], turn_end=2) == [
        (3, 6),
        (13, 14),
    ]


def test_learning_rate_and_phases() -> None:
    recipe = Recipe("ci", seed=0, steps=100, warm_up_steps=10)
    assert [round(recipe.rate(step), 6) for step in (0, 4, 9, 50, 70, 85, 99)] == [
        0.0006, 0.003, 0.006, 0.006, 0.006, 0.003, 0.0002,
    ]  # fmt: skip
    assert [recipe.flawed(step) for step in (0, 59, 60, 99)] == [False, False, True, True]


# --- the command -------------------------------------------------------------------------------------------------


def test_it_is_reproducible_and_made_once(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--steps", "3", "--threads", "1", "--out"]
    again = tmp_path / "deep" / "model"
    make_policy.main([*arguments, str(again)])
    for path in policy_folder.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    assert list(again.parent.iterdir()) == [again]
    weights = (again / "model.safetensors").stat()
    capsys.readouterr()
    make_policy.main([*arguments, str(again)])
    assert "up to date" in capsys.readouterr().out
    assert (again / "model.safetensors").stat() == weights


def test_other_arguments_make_it_anew(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    make_policy.main(["--steps", "1", "--threads", "1", "--out", str(folder)])
    first = (folder / "model.safetensors").read_bytes()
    make_policy.main(["--steps", "1", "--seed", "1", "--threads", "1", "--out", str(folder)])
    assert (folder / "model.safetensors").read_bytes() != first
    out = capsys.readouterr().out
    assert "warm start: step 1 of 1, loss" in out
    assert "knows the tool protocol" in out


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(SystemExit) as caught:
        make_policy.main(["--steps", "1", "--out", str(tmp_path)])
    assert caught.value.code == 2
    assert "was not made by this script" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
