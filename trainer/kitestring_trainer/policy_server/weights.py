"""New weights: read whole and verified before anything changes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kitestring_trainer.policy_server.errors import RequestRefused

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_INDEX = 1 << 26
"""Bytes; those of models of a hundred thousand tensors have a tenth of it."""


def read_weights(folder: str, root: Path | None, current: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read `folder`/model.safetensors, or the files that model.safetensors.index.json beside names: all must lie below
    `root` and together hold exactly the tensors of the model.

    current: the model's own tensors by name; names that share storage (tied) may be given once or, if equal, several
    times. Returns the new values by name; takes the memory of them once, and none for what does not fit by name or
    shape. Raises RequestRefused: outside the root 400, missing 404, names, shapes or values that do not fit 400.
    """
    if root is None:
        raise RequestRefused("this server has no weights_root, so it reloads nothing", param="weights_path")
    source, shards = _shards(folder, root)
    shapes: dict[str, list[int]] = {}
    for path, promised in shards.items():
        with _opened(path) as file:
            found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if promised is not None and promised != set(found):
            name = min(promised ^ set(found))
            raise _refused(f"{source}: {name} is in {path.name}, or said to be, but not both")
        shapes |= found
    _refuse_unless_same(source, list(shapes), current)
    for name, shape in shapes.items():
        if shape != list(current[name].shape):
            raise _refused(f"{source}: {name} has shape {shape}, the model {list(current[name].shape)}")
    weights: dict[str, torch.Tensor] = {}
    for path in shards:
        with _opened(path) as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if {name: list(tensor.shape) for name, tensor in weights.items()} != shapes:
        raise _refused(f"{source} changed while it was read")
    seen: dict[int, str] = {}
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise _refused(f"{source}: {name} holds values that are not finite")
        tied = seen.setdefault(current[name].data_ptr(), name)
        if tied != name and not torch.equal(tensor, weights[tied]):
            raise _refused(f"{source}: {name} and {tied} are one tensor in the model but differ")
    return weights


def _shards(folder: str, root: Path) -> tuple[Path, dict[Path, set[str] | None]]:
    """What names the tensors of a folder, and its files with the names that are said to be in each (None: unsaid)."""
    single, index = (_below(folder, name, root) for name in (FILE, INDEX))
    if single.is_file():
        return single, {single: None}
    if not index.is_file():
        raise RequestRefused(
            f"{single} does not exist, nor does {INDEX} beside it", status=HTTPStatus.NOT_FOUND, param="weights_path"
        )
    promised: dict[Path, set[str] | None] = {}
    for name, file in _weight_map(index).items():
        if not isinstance(file, str) or file in {"", ".."} or "\0" in file or Path(file).name != file:
            raise _refused(f"{index}: {name} is in {file!r}, which is no name of a file beside it")
        names = promised.setdefault(_below(folder, file, root), set())
        assert names is not None
        names.add(name)
    for path in promised:
        if not path.is_file():
            raise RequestRefused(f"{path} does not exist", status=HTTPStatus.NOT_FOUND, param="weights_path")
    return index, promised


def _weight_map(index: Path) -> Mapping[str, Any]:
    if index.stat().st_size > _LONGEST_INDEX:
        raise _refused(f"{index} is longer than {_LONGEST_INDEX} bytes")
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(f"{index} has no weight_map: {error}") from error
    if not isinstance(found, dict):
        raise _refused(f"{index}: weight_map is no object")
    return found


def _below(folder: str, name: str, root: Path) -> Path:
    path = (Path(folder) / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise _refused(f"weights_path {folder} is not below the weights root {root}")
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise _refused(f"{path} is not a whole safetensors file: {error}") from error


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="weights_path")


def _refuse_unless_same(path: Path, names: list[str], current: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(set(names) - set(current))
    given = {current[name].data_ptr() for name in names if name in current}
    missing = sorted(name for name, tensor in current.items() if tensor.data_ptr() not in given)
    for problem, which in (("has tensors the model lacks", unknown), ("lacks tensors of the model", missing)):
        if which:
            more = f" and {len(which) - 3} more" if len(which) > 3 else ""
            raise _refused(f"{path} {problem}: {', '.join(which[:3])}{more}")
