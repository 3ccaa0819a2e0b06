"""The decoding thread, without HTTP: exact logprobs in any company, and every change between two tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kitestring_trainer.policy_server.attention import SlotCache
from kitestring_trainer.policy_server.engine import Engine, NotPaused
from kitestring_trainer.policy_server.errors import PolicyServerError, RequestRefused
from kitestring_trainer.policy_server.model import ServedModel, load_model
from kitestring_trainer.policy_server.sampling import Sampling
from kitestring_trainer.policy_server.sequence import GeneratedSequence
from kitestring_trainer.policy_server.weights import read_weights

SLOTS = 6


class Running:
    """An engine, and a way to wait for what it says."""

    def __init__(self, model: ServedModel, slots: int = SLOTS) -> None:
        self.changed = threading.Condition()
        self.errors: list[BaseException] = []
        self.hook: Callable[[list[GeneratedSequence]], None] = lambda news: None
        self.engine = Engine(model, max_sequences=slots, version="0", publish=self._publish, failed=self.errors.append)
        self.engine.start()

    def _publish(self, news: list[GeneratedSequence]) -> None:
        self.hook(news)
        with self.changed:
            self.changed.notify_all()

    def until(self, true: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(true, timeout=30), self.errors

    def finish(self, *sequences: GeneratedSequence) -> None:
        self.until(lambda: all(sequence.finish_reason for sequence in sequences))


def sequence(prompt: list[int], max_tokens: int, seed: int = 0, **fields: object) -> GeneratedSequence:
    made = GeneratedSequence(
        prompt=prompt,
        sampling=Sampling(),
        noise=Random(seed),
        max_tokens=max_tokens,
        stop_tokens={},
        text=None,
        notify=lambda: None,
        live=True,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def reference(folder: Path, made: GeneratedSequence) -> torch.Tensor:
    """Logprobs of the generated tokens by a plain forward pass of transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([made.prompt + made.tokens])).logits[0, len(made.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(made.tokens).unsqueeze(1)).squeeze(1)


def assert_exact(folder: Path, *sequences: GeneratedSequence) -> None:
    for made in sequences:
        assert len(made.tokens) == len(made.logprobs) == made.published
        assert float((torch.tensor(made.logprobs) - reference(folder, made)).abs().max()) <= 1e-4


def _small(kind: str) -> PreTrainedModel:
    common = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 128}
    common |= {"num_hidden_layers": 2, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **common))
    return Qwen2ForCausalLM(
        Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **common)
    )


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one small model."""
    root = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        for seed in (0, 1):
            torch.manual_seed(seed)
            _small(request.param).save_pretrained(root / str(seed))
    return root / "0", root / "1"


@pytest.fixture
def running(folders: tuple[Path, Path]) -> Iterator[Running]:
    made = Running(load_model(folders[0], None))
    yield made
    made.engine.stop()
    assert made.errors == []


def test_logprobs_are_exact_in_any_company(running: Running, folders: tuple[Path, Path]) -> None:
    """More sequences than slots, of all lengths, joining and leaving at different tokens, some with equal prompts."""
    random = Random(5)
    shared = [random.randrange(60) for _ in range(20)]
    sequences = [
        sequence(
            shared if number % 3 == 0 else [random.randrange(60) for _ in range(random.randint(1, 70))],
            max_tokens=random.randint(1, 50),
            seed=number,
        )
        for number in range(30)
    ]
    late = iter(sequences[10:])

    def join_one(_: list[GeneratedSequence]) -> None:
        if (one := next(late, None)) is not None:
            running.engine.submit([one])

    running.hook = join_one
    running.engine.submit(sequences[:10])
    running.finish(*sequences)
    assert {made.finish_reason for made in sequences} == {"length"}
    assert all(len(made.tokens) == made.max_tokens for made in sequences)
    assert_exact(folders[0], *sequences)


def test_a_seed_gives_the_same_reply_alone_and_in_company(running: Running) -> None:
    alone = sequence([1, 2, 3], 40, seed=7)
    running.engine.submit([alone])
    running.finish(alone)
    again = sequence([1, 2, 3], 40, seed=7)
    others = [sequence([number] * (number + 1), 30, seed=number) for number in range(5)]
    running.engine.submit([*others[:3], again, *others[3:]])
    running.finish(again, *others)
    assert again.tokens == alone.tokens


def test_equal_prompts_are_computed_once_and_sampled_apart(running: Running, folders: tuple[Path, Path]) -> None:
    twins = [sequence([5, 6, 7, 8], 20, seed=number) for number in range(4)]
    mixed = [sequence([9], 20, seed=9), *twins[:2], sequence([8, 8], 20, seed=8), *twins[2:]]
    running.engine.submit(mixed)
    running.finish(*mixed)
    assert len({tuple(made.tokens) for made in twins}) == 4
    assert_exact(folders[0], *mixed)


def test_the_whole_context_can_be_filled(running: Running, folders: tuple[Path, Path]) -> None:
    full = sequence([3] * 28, 100)
    running.engine.submit([full])
    running.finish(full)
    assert full.length == 128
    assert_exact(folders[0], full)


def test_stop_tokens_end_a_sequence(running: Running) -> None:
    free = sequence([1, 2], 30, seed=3)
    running.engine.submit([free])
    running.finish(free)
    stop = free.tokens[10]
    stopped = sequence([1, 2], 30, seed=3, stop_tokens={stop: stop})
    running.engine.submit([stopped])
    running.finish(stopped)
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_weights_change_at_an_exact_token(running: Running, folders: tuple[Path, Path]) -> None:
    old = [sequence([1, 2, 3, number], 60, seed=number) for number in range(3)]
    running.engine.submit(old)
    running.until(lambda: all(len(made.tokens) >= 5 for made in old))
    running.engine.pause("keep").result(timeout=30)
    before = [len(made.tokens) for made in old]
    queued = sequence([4, 4], 10, seed=4)
    running.engine.submit([queued])
    new_weights = read_weights(str(folders[1]), folders[1], load_model(folders[0], None).weights())
    running.engine.install(new_weights).result(timeout=30)
    running.engine.set_version("1").result(timeout=30)
    assert [len(made.tokens) for made in old] == before
    running.engine.resume().result(timeout=30)
    running.finish(*old, queued)
    for made, boundary in zip(old, before, strict=True):
        assert made.version_spans() == [
            {"version": "0", "start": 0, "end": boundary},
            {"version": "1", "start": boundary, "end": 60},
        ]
        found = torch.tensor(made.logprobs)
        first, second = reference(folders[0], made), reference(folders[1], made)
        assert float((found[:boundary] - first[:boundary]).abs().max()) <= 1e-4
        # Keys and values of the earlier tokens are those of the new weights too.
        assert float((found[boundary:] - second[boundary:]).abs().max()) <= 1e-4
        assert float((first[boundary:] - second[boundary:]).abs().max()) > 0.1
    assert queued.version_spans() == [{"version": "1", "start": 0, "end": 10}]


def test_weights_do_not_change_while_sequences_run(running: Running, folders: tuple[Path, Path]) -> None:
    weights = load_model(folders[1], None).weights()
    with pytest.raises(NotPaused):
        running.engine.install(weights).result(timeout=30)
    made = sequence([1], 100)
    running.engine.submit([made])
    running.until(lambda: bool(made.tokens))
    draining = running.engine.pause("wait")
    if not draining.done():
        with pytest.raises(NotPaused):
            running.engine.install(weights).result(timeout=30)
    draining.result(timeout=30)
    assert len(made.tokens) == 100
    running.engine.install(weights).result(timeout=30)
    running.engine.resume().result(timeout=30)
    after = sequence([1], 10)
    running.engine.submit([after])
    running.finish(after)
    assert_exact(folders[0], made)
    assert_exact(folders[1], after)


def test_wait_leaves_new_sequences_for_later(running: Running) -> None:
    first = sequence([1], 100)
    running.engine.submit([first])
    running.until(lambda: bool(first.tokens))
    draining = running.engine.pause("wait")
    later = sequence([2], 5)
    running.engine.submit([later])
    draining.result(timeout=30)
    assert first.finish_reason == "length"
    assert later.tokens == []
    running.engine.resume().result(timeout=30)
    running.finish(later)


def test_abort_ends_everything_with_what_there_is(running: Running, folders: tuple[Path, Path]) -> None:
    sequences = [sequence([number], 100, seed=number) for number in range(SLOTS + 3)]
    running.engine.submit(sequences)
    running.until(lambda: bool(sequences[0].tokens))
    running.engine.pause("abort").result(timeout=30)
    assert {made.finish_reason for made in sequences} == {"abort"}
    assert sequences[-1].tokens == []
    assert running.engine.stats().running == running.engine.stats().waiting == 0
    running.engine.resume().result(timeout=30)
    assert_exact(folders[0], *(made for made in sequences if made.tokens))


def test_cancelled_sequences_leave_the_others_alone(running: Running, folders: tuple[Path, Path]) -> None:
    sequences = [sequence([number, 1], 60, seed=number) for number in range(SLOTS + 2)]
    running.engine.submit(sequences)
    running.until(lambda: len(sequences[0].tokens) >= 3)
    gone = [sequences[0], sequences[2], sequences[-1]]
    running.engine.cancel(gone)
    running.finish(*sequences)
    assert {made.finish_reason for made in gone} == {"abort"}
    stayed = [made for made in sequences if made not in gone]
    assert {made.finish_reason for made in stayed} == {"length"}
    assert_exact(folders[0], *stayed)


def test_cancelling_works_while_paused(running: Running) -> None:
    made = sequence([1], 100)
    running.engine.submit([made])
    running.until(lambda: bool(made.tokens))
    running.engine.pause("keep").result(timeout=30)
    running.engine.cancel([made])
    running.finish(made)
    assert made.finish_reason == "abort"
    running.engine.resume().result(timeout=30)


def test_an_output_that_is_not_finite_ends_its_sequence_only(folders: tuple[Path, Path]) -> None:
    model = load_model(folders[0], None)
    if model.config.tie_word_embeddings:
        pytest.skip("a poisoned embedding would poison the head and so every sequence")
    poison = 59
    model.model.get_input_embeddings().weight[poison] = torch.nan
    running = Running(model)
    spoiled = sequence([1, poison], 20)
    # The others end before they would take the poison in.
    others = [sequence([2, 3] * number, 60, seed=number, stop_tokens={poison: None}) for number in (1, 2, 9)]
    running.engine.submit([others[0], spoiled, *others[1:]])
    running.finish(spoiled, *others)
    later = [sequence([4] * number, 20, seed=number, stop_tokens={poison: None}) for number in range(1, SLOTS + 1)]
    running.engine.submit(later)
    running.finish(*later)
    running.engine.stop()
    assert (spoiled.finish_reason, spoiled.tokens) == ("error", [])
    assert {made.finish_reason for made in (*others, *later)} <= {"length", "stop"}


def test_a_failing_thread_ends_every_sequence_and_says_why(folders: tuple[Path, Path]) -> None:
    model = load_model(folders[0], None)
    running = Running(model)
    model.forward = None  # type: ignore[assignment]
    made = [sequence([1], 5), sequence([2], 5)]
    running.engine.submit(made)
    running.finish(*made)
    assert {one.finish_reason for one in made} == {"error"}
    running.until(lambda: bool(running.errors) or not running.engine.alive)
    assert isinstance(running.errors[0], TypeError)


def test_a_cache_that_no_machine_holds_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(PolicyServerError, match="lower max_sequences or max_model_len"):
        SlotCache(load_model(folders[0], None).config, slots=10**6, length=10**6)


# --- weights on disk ------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_whole(folders: tuple[Path, Path], tmp_path: Path) -> None:
    current = load_model(folders[0], None).weights()
    good = load_file(folders[1] / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"

    def refusal(tensors: dict[str, torch.Tensor] | bytes) -> str:
        folder = tmp_path / "w"
        folder.mkdir(exist_ok=True)
        if isinstance(tensors, bytes):
            (folder / "model.safetensors").write_bytes(tensors)
        else:
            save_file(tensors, folder / "model.safetensors")
        with pytest.raises(RequestRefused) as refused:
            read_weights(str(folder), tmp_path, current)
        return refused.value.message

    assert f"lacks tensors of the model: {name}" in refusal({k: v for k, v in good.items() if k != name})
    assert "tensors the model lacks: extra" in refusal({**good, "extra": torch.zeros(1)})
    assert f"{name} has shape [1, 2], the model [48, 32]" in refusal({**good, name: torch.zeros(1, 2)})
    assert f"{name} holds values that are not finite" in refusal({**good, name: good[name] * torch.inf})
    whole = (folders[1] / "model.safetensors").read_bytes()
    assert "not a whole safetensors file" in refusal(whole[: len(whole) // 2])


def shard(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Put tensors into two files and say so in an index; gives its weight_map."""
    folder.mkdir(exist_ok=True)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = sorted(tensors)
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    where = {name: files[at % 2] for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def test_weights_in_several_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """As large models come, and as the trainer then publishes the first version."""
    current = load_model(folders[0], None).weights()
    shard(tmp_path / "w", load_file(folders[1] / "model.safetensors"))
    found = read_weights(str(tmp_path / "w"), tmp_path, current)
    wanted = read_weights(str(folders[1]), folders[1], current)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_in_several_files_that_are_not_what_their_index_says(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = load_model(folders[0], None).weights()
    good = load_file(folders[1] / "model.safetensors")
    folder, name = tmp_path / "w", "model.layers.0.mlp.up_proj.weight"
    where = shard(folder, good)
    index = folder / "model.safetensors.index.json"

    def refusal(said: object) -> str:
        index.write_text(said if isinstance(said, str) else json.dumps({"weight_map": said}))
        with pytest.raises(RequestRefused) as refused:
            read_weights(str(folder), tmp_path, current)
        return refused.value.message

    other = next(file for file in where.values() if file != where[name])
    assert f"{name} is in " in refusal({**where, name: other})
    assert f"{name} is in " in refusal({k: v for k, v in where.items() if k != name})
    assert "extra is in " in refusal({**where, "extra": other})
    assert "lacks tensors of the model" in refusal({k: v for k, v in where.items() if v != other})
    assert "model-3.safetensors does not exist" in refusal({**where, name: "model-3.safetensors"})
    for outside in ("../x.safetensors", "/x.safetensors", "", ".", "..", "a\0b", 3):
        assert "which is no name of a file beside it" in refusal({**where, name: outside})
    assert "has no weight_map" in refusal("{}") and "has no weight_map" in refusal("[") and "no object" in refusal([])
    (tmp_path.parent / "outside.safetensors").write_bytes((folder / other).read_bytes())
    (folder / "link.safetensors").symlink_to(tmp_path.parent / "outside.safetensors")
    assert "not below the weights root" in refusal({**where, name: "link.safetensors"})
    shard(folder, {**good, name: torch.zeros(1, 2)})
    read = index.read_text()
    assert f"{name} has shape [1, 2], the model [48, 32]" in refusal(read)
    monkeypatch.setattr("kitestring_trainer.policy_server.weights._LONGEST_INDEX", 10)
    assert "is longer than 10 bytes" in refusal(read)


def test_weights_are_read_from_below_the_root_only(folders: tuple[Path, Path], tmp_path: Path) -> None:
    current = load_model(folders[0], None).weights()
    (tmp_path / "link").symlink_to(folders[1])
    outside = [str(folders[1]), str(tmp_path / ".." / folders[1].parent.name / "1"), str(tmp_path / "link")]
    for path in outside:
        with pytest.raises(RequestRefused, match="not below the weights root"):
            read_weights(path, tmp_path, current)
    with pytest.raises(RequestRefused, match="does not exist"):
        read_weights(str(tmp_path / "absent"), tmp_path, current)
    with pytest.raises(RequestRefused, match="no weights_root"):
        read_weights(str(folders[1]), None, current)


def test_half_precision_weights_are_widened(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = load_model(folders[0], None)
    half = {name: tensor.bfloat16() for name, tensor in load_file(folders[1] / "model.safetensors").items()}
    save_file(half, tmp_path / "model.safetensors")
    model.install(read_weights(str(tmp_path), tmp_path, model.weights()))
    own = model.weights()
    for name, tensor in half.items():
        assert own[name].dtype == torch.float32
        assert torch.equal(own[name], tensor.float())


def test_tied_weights_stay_tied(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = load_model(folders[0], None)
    if not model.config.tie_word_embeddings:
        pytest.skip("this model's are apart")
    new = load_file(folders[1] / "model.safetensors")
    embedding = new["model.embed_tokens.weight"]
    save_file({**new, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    model.install(read_weights(str(tmp_path), tmp_path, model.weights()))
    assert torch.equal(model.model.lm_head.weight, embedding)
    save_file({**new, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    with pytest.raises(RequestRefused, match="one tensor in the model but differ"):
        read_weights(str(tmp_path), tmp_path, model.weights())
