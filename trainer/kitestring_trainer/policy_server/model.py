"""The model that is served: loading, one forward pass over a Batch, and new weights in place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from kitestring_trainer.policy_server.attention import BATCH_ARGUMENT, IMPLEMENTATION, Batch, SlotCache, make_batch
from kitestring_trainer.policy_server.errors import PolicyServerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHECK_TOLERANCE = 1e-3
"""Largest difference of a logprob between our batched pass and the model's own at start; float32 noise is some 1e-5."""


class ServedModel:
    """A causal language model in float32 on the CPU, for one thread at a time."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self.config = model.config
        self.vocabulary = int(model.config.vocab_size)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Write the batch's keys and values to its cache and return the logits at `batch.last`: float32 [B + P, V]."""
        keep = {"logits_to_keep": batch.last} if self._keeps else {}
        extra: dict[str, Any] = {BATCH_ARGUMENT: batch}
        logits: torch.Tensor = self.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **keep, **extra
        ).logits[0]
        return logits if self._keeps else logits.index_select(0, batch.last)

    def weights(self) -> dict[str, torch.Tensor]:
        """Name -> tensor of everything a safetensors file of this model holds, tied names included; not copies."""
        return dict(self.model.state_dict())

    @torch.inference_mode()
    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy new values into the parameters. The caller has verified names and shapes (weights.read_weights)."""
        own = self.weights()
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def load_model(folder: Path, max_model_len: int | None) -> ServedModel:
    """Load a Hugging Face folder. Raises PolicyServerError when it is missing, unreadable, or cannot be served."""
    if not folder.is_dir():
        raise PolicyServerError(f"model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        raise PolicyServerError(f"model folder {folder} has no config.json: not a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise PolicyServerError(f"model folder {folder} cannot be loaded: {' '.join(str(error).split())}") from error
    model, found = loaded
    if found["missing_keys"]:
        raise PolicyServerError(f"model folder {folder} lacks weights: {', '.join(sorted(found['missing_keys'])[:3])}")
    limit = getattr(model.config, "max_position_embeddings", None)
    length = max_model_len or limit
    if length is None:
        raise PolicyServerError(f"model {folder} does not say how many positions it has; set max_model_len")
    if limit is not None and length > limit:
        raise PolicyServerError(f"max_model_len is {length}, but model {folder} has {limit} positions; lower it")
    model.train(mode=False)
    model.requires_grad_(requires_grad=False)
    served = ServedModel(model, int(length))
    _check(served)
    return served


def _check(served: ServedModel) -> None:
    """Serve a few tokens our way and the model's own way; refuse the model when they disagree."""
    name = type(served.model).__name__
    steps = 2
    size = min(8, served.max_model_len)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(served.vocabulary, (length,), generator=generator).tolist() for length in (size, max(3, size - 3))
    ]
    try:
        cache = SlotCache(served.config, len(sequences), served.max_model_len)
        rows = [served.forward(make_batch(cache, [], [ids[: len(ids) - steps] for ids in sequences]))]
        for step in range(steps):
            places = [len(ids) - steps + step for ids in sequences]
            tokens = [(ids[place], place) for ids, place in zip(sequences, places, strict=True)]
            rows.append(served.forward(make_batch(cache, tokens, [])))
        ours = torch.stack(rows, dim=1).log_softmax(-1)
        served.model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            theirs = torch.stack(
                [served.model(torch.tensor([ids]), use_cache=False).logits[0, -steps - 1 :] for ids in sequences]
            ).log_softmax(-1)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError) as error:
        raise PolicyServerError(f"{name} cannot be served by the CPU policy server: {error!r}") from error
    finally:
        served.model.set_attn_implementation(IMPLEMENTATION)
    if not theirs.isfinite().all():
        raise PolicyServerError(f"{name} gives logprobs that are not finite: its weights are spoiled")
    difference = float((ours - theirs).abs().max())
    if not difference <= _CHECK_TOLERANCE:
        raise PolicyServerError(
            f"{name} cannot be served by the CPU policy server: batched logprobs differ from the model's own by "
            f"{difference:.2g} (allowed {_CHECK_TOLERANCE})"
        )
