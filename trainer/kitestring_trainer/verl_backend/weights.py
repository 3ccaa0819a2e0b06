"""Pushes weights as a Hugging Face folder: a backend of verl's checkpoint engine, running in the training processes."""

from __future__ import annotations

import json
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from kitestring_trainer.verl_backend import folders
from kitestring_trainer.verl_backend.names import WEIGHTS_BACKEND

SHARD_BYTES = 5 * 10**9


@CheckpointEngineRegistry.register(WEIGHTS_BACKEND)
class FolderEngine(CheckpointEngine):
    """Rank 0 writes every version to `root/vNNNNNN`; all ranks take part in gathering the tensors.

    Args:
        root: folder for versions.
        model: the initial model, whose tensor names, config and tokenizer the versions have.
        dtype: of the floating-point tensors written.
    """

    def __init__(self, bucket_size: int, is_master: bool, root: str, model: str, dtype: str) -> None:
        self._is_master = is_master
        self._root, self._model = Path(root), Path(model)
        self._dtype: torch.dtype = getattr(torch, dtype)

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Write version `global_steps`; returns nothing: the path follows from root and version."""
        if global_steps is None:
            raise ValueError("a push needs the version it is")
        wanted = checkpoint_tensor_names(self._model)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if self._is_master and (wanted is None or name in wanted):
                tensors[name] = self._own_copy(tensor)
        if self._is_master:
            if wanted is not None and (missing := wanted - tensors.keys()):
                raise RuntimeError(
                    f"version {global_steps} lacks {len(missing)} of {len(wanted)} tensors of {self._model}: "
                    f"{', '.join(sorted(missing)[:8])}"
                )
            self._write(global_steps, tensors)
        return {}

    def _own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the CPU, contiguous, and of the written type; a copy, since the engine may reuse its memory."""
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()

    def _write(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        final = folders.weights_folder(self._root, version)
        content = {"version": version, "tensors": len(tensors), "dtype": str(self._dtype).removeprefix("torch.")}
        with folders.WholeFolder(final, folders.WEIGHTS_MARKER, content) as folder:
            folders.copy_model_files(self._model, folder)
            self._set_dtype(folder / "config.json")
            write_safetensors(folder, tensors)

    def _set_dtype(self, config: Path) -> None:
        content = json.loads(config.read_text())
        content.pop("torch_dtype", None)
        content["dtype"] = str(self._dtype).removeprefix("torch.")
        config.write_text(json.dumps(content, indent=2) + "\n")

    def prepare(self) -> dict[str, Any]:
        return {}

    def finalize(self) -> None: ...

    def init_process_group(self, **kwargs: Any) -> None: ...

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("policy servers read the folder; there is no process group with them")

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        raise NotImplementedError("policy servers read the folder")


def write_safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One `model.safetensors`, or shards with an index once it would be larger than `SHARD_BYTES`."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / folders.WEIGHT_INDEX).write_text(json.dumps(content, indent=2) + "\n")


def checkpoint_tensor_names(model: Path) -> set[str] | None:
    """Names in the safetensors of a Hugging Face folder; None when it has none (a folder of `.bin` files).

    A tied output layer is not in the file though the module lists it: only the names in the file are written again.
    """
    names: set[str] = set()
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            names.update(json.loads(file.read(length)).keys() - {"__metadata__"})
    return names or None
