"""New weights: read whole and verified before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kitestring_trainer.policy_server.errors import RequestRefused

FILE = "model.safetensors"


def read_weights(folder: str, root: Path | None, current: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read `folder`/model.safetensors, which must lie below `root` and hold exactly the tensors of the model.

    current: the model's own tensors by name; names that share storage (tied) may be given once or, if equal, several
    times. Returns the new values by name. Raises RequestRefused: outside the root 400, missing 404, names, shapes or
    values that do not fit 400.
    """
    if root is None:
        raise RequestRefused("this server has no weights_root, so it reloads nothing", param="weights_path")
    path = (Path(folder) / FILE).resolve()
    if not path.is_relative_to(root.resolve()):
        raise RequestRefused(f"weights_path {folder} is not below the weights root {root}", param="weights_path")
    if not path.is_file():
        raise RequestRefused(f"{path} does not exist", status=HTTPStatus.NOT_FOUND, param="weights_path")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            _refuse_unless_same(path, names, current)
            weights = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise RequestRefused(f"{path} is not a whole safetensors file: {error}", param="weights_path") from error
    seen: dict[int, str] = {}
    for name, tensor in weights.items():
        if tensor.shape != current[name].shape:
            found, wanted = list(tensor.shape), list(current[name].shape)
            raise RequestRefused(f"{path}: {name} has shape {found}, the model {wanted}", param="weights_path")
        if not torch.isfinite(tensor).all():
            raise RequestRefused(f"{path}: {name} holds values that are not finite", param="weights_path")
        tied = seen.setdefault(current[name].data_ptr(), name)
        if tied != name and not torch.equal(tensor, weights[tied]):
            raise RequestRefused(
                f"{path}: {name} and {tied} are one tensor in the model but differ", param="weights_path"
            )
    return weights


def _refuse_unless_same(path: Path, names: list[str], current: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(set(names) - set(current))
    given = {current[name].data_ptr() for name in names if name in current}
    missing = sorted(name for name, tensor in current.items() if tensor.data_ptr() not in given)
    for problem, which in (("has tensors the model lacks", unknown), ("lacks tensors of the model", missing)):
        if which:
            more = f" and {len(which) - 3} more" if len(which) > 3 else ""
            raise RequestRefused(f"{path} {problem}: {', '.join(which[:3])}{more}", param="weights_path")
