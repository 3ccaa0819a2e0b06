"""A random tiny policy, rows made for it, and plain torch that says what training must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kitestring_trainer.learner import PushedWeights, StepBatch, TrainingRow, UpdateMetrics

VOCABULARY = 64


def make_model(folder: Path, layers: int = 2) -> Path:
    """A random Llama of 0.1 M parameters with a word-level tokenizer, as Hugging Face files."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", pad_token="t0").save_pretrained(folder)
    return folder


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logprobs(model, row: TrainingRow):
    """Log-probabilities [R] of the response's tokens, and entropies [R], with gradient."""
    import torch

    ids = torch.from_numpy(np.concatenate((row.prompt_ids, row.response_ids)))
    scores = torch.log_softmax(model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1].float(), -1)
    taken = scores.gather(1, torch.from_numpy(row.response_ids)[:, None])[:, 0]
    return taken, -(scores.exp() * scores).sum(-1)


def row(
    rollout: str,
    prompt: int,
    response: int,
    *,
    generator: np.random.Generator,
    mini_batch: int = 0,
    advantage: float = 1.0,
    weight: float = 1.0,
    trained: Sequence[int] | None = None,
    current: bool = True,
) -> TrainingRow:
    """A row of random tokens; `trained` are the positions that the mask keeps (None: all)."""
    mask = np.zeros(response, dtype=np.int64)
    mask[list(range(response)) if trained is None else list(trained)] = 1
    return TrainingRow(
        rollout=rollout,
        group=rollout.split("-", maxsplit=1)[0],
        mini_batch=mini_batch,
        prompt_ids=generator.integers(3, VOCABULARY, prompt),
        response_ids=generator.integers(3, VOCABULARY, response),
        response_mask=mask,
        rollout_logprobs=np.zeros(response, dtype=np.float32),
        advantage=advantage,
        loss_weight=weight,
        current_version=np.full(response, current),
    )


def sampled(rows: Sequence[TrainingRow], weights: Path) -> tuple[TrainingRow, ...]:
    """The rows with the log-probabilities that the policy in `weights` gives their tokens."""
    import dataclasses

    import torch

    model, out = load(weights), []
    for given in rows:
        with torch.no_grad():
            values = logprobs(model, given)[0].numpy()
        out.append(dataclasses.replace(given, rollout_logprobs=(values * given.response_mask).astype(np.float32)))
    return tuple(out)


class Script:
    """A step source: `batches(step, weights folder)` makes the rows; everything that happened is kept."""

    def __init__(
        self,
        batches: Callable[[int, Path], StepBatch],
        finished: Callable[[int, UpdateMetrics], None] = lambda step, metrics: None,
        steps: int = 50,
    ) -> None:
        self._batches, self._finished = batches, finished
        self.steps = steps
        self.states: list[int] = []
        self.weights: dict[int, Path] = {}
        self.metrics: dict[int, UpdateMetrics] = {}
        self.tensors: dict[int, dict[str, object]] = {}

    def step_batch(self, step: int) -> StepBatch:
        return self._batches(step, self.weights[step - 1])

    def weights_ready(self, weights: PushedWeights) -> None:
        from safetensors.torch import load_file

        assert weights.version not in self.weights
        self.weights[weights.version] = weights.path
        self.tensors[weights.version] = load_file(weights.path / "model.safetensors")

    def state_saved(self, step: int, folder: Path) -> None:
        assert folder.is_dir()
        self.states.append(step)

    def step_finished(self, step: int, metrics: UpdateMetrics) -> None:
        self.metrics[step] = metrics
        self._finished(step, metrics)
