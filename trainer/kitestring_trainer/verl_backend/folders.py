"""Folders on disk that must be whole or absent: pushed weights and resumable states. Standard library only.

A folder is written under a temporary name, flushed, and renamed; a marker file written last says what is in it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

WEIGHTS_MARKER = "kitestring_weights.json"
STATE_MARKER = "kitestring_state.json"
MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
"""What is copied from the initial model beside the weights: config, tokenizer, chat template, model code."""
WEIGHT_INDEX = "model.safetensors.index.json"


class WholeFolder:
    """`with WholeFolder(path, MARKER, {...}) as temporary:` fill `temporary`; then it appears at `path` at once."""

    def __init__(self, final: Path, marker: str, content: Mapping[str, object]) -> None:
        self._final, self._marker, self._content = final, marker, content
        self._temporary = final.with_name(f".{final.name}.part")

    def __enter__(self) -> Path:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        (self._temporary / self._marker).write_text(json.dumps(dict(self._content), indent=2) + "\n")
        for path in sorted(self._temporary.rglob("*"), reverse=True):  # what a folder holds comes before the folder
            flush(path)
        flush(self._temporary)
        # A folder of the same name is one that an earlier life of the run wrote for the same step. It goes last.
        aside = self._final.with_name(f".{self._final.name}.old")
        if self._final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self._final.replace(aside)
        self._temporary.replace(self._final)
        flush(self._final.parent)
        shutil.rmtree(aside, ignore_errors=True)


def flush(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_marker(folder: Path, marker: str) -> dict[str, object] | None:
    """The marker's content; None when the folder is not a complete one."""
    try:
        content = json.loads((folder / marker).read_text())
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else None


def weights_folder(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def state_folder(root: Path, step: int) -> Path:
    return root / f"state-{step:06d}"


def complete(root: Path, prefix: str, marker: str) -> list[Path]:
    """Complete folders below `root`, oldest first."""
    return [p for p in sorted(root.glob(f"{prefix}[0-9]*")) if (p / marker).is_file()]


def prune(root: Path, prefix: str, marker: str, keep: int) -> None:
    """Remove all complete folders but the newest `keep`, and what a crash left half written."""
    for folder in complete(root, prefix, marker)[:-keep] if keep else []:
        shutil.rmtree(folder)
    for kind in ("part", "old"):
        for folder in root.glob(f".{prefix}[0-9]*.{kind}"):
            shutil.rmtree(folder)


def drop_later(root: Path, prefix: str, number: int) -> None:
    """Remove folders with a number beyond `number`: an earlier life of the run wrote them and they are superseded."""
    for folder in root.glob(f"{prefix}[0-9]*"):
        if int(folder.name.removeprefix(prefix)) > number:
            shutil.rmtree(folder)


def newest_state(root: Path) -> Path | None:
    """The resumable state to go on from; None when there is none. For the process that writes them: one that a crash
    left aside while it was replaced is put back."""
    for aside in root.glob(".state-[0-9]*.old"):
        final = root / aside.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            aside.replace(final)
    states = complete(root, "state-", STATE_MARKER)
    return states[-1] if states else None


def copy_model_files(model: Path, folder: Path) -> None:
    """Copy config, tokenizer and chat template of the initial model, so that `folder` loads by itself."""
    for pattern in MODEL_FILES:
        for path in model.glob(pattern):
            if path.name not in {WEIGHT_INDEX, WEIGHTS_MARKER}:
                shutil.copyfile(path, folder / path.name)


def export_weights(weights: Path, destination: Path) -> None:
    """Copy a pushed version to `destination` as a checkpoint of its own: a Hugging Face folder, whole or absent."""
    content = read_marker(weights, WEIGHTS_MARKER)
    if content is None:
        raise FileNotFoundError(f"{weights} is no complete weights folder")
    with WholeFolder(destination, WEIGHTS_MARKER, content) as folder:
        for path in weights.iterdir():
            if path.name != WEIGHTS_MARKER:
                shutil.copyfile(path, folder / path.name)
