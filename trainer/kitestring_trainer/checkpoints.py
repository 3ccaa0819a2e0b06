"""Exported checkpoints: ordinary Hugging Face folders, the latest few and the best by validation."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from kitestring_trainer.artifacts import Artifacts
from kitestring_trainer.verl_backend.folders import export_weights, flush

INDEX = "checkpoints.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint folder. `reward` is its mean reward in sampled validation, None when it was not validated."""

    folder: str
    step: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    exported: tuple[Exported, ...] = ()
    """In the order of their steps."""
    best: Exported | None = None

    @property
    def latest(self) -> Exported | None:
        return self.exported[-1] if self.exported else None

    def adding(self, new: Exported, *, is_best: bool) -> CheckpointIndex:
        others = tuple(known for known in self.exported if known.step < new.step)
        return CheckpointIndex((*others, new), new if is_best else self.best)

    def surplus(self, keep: int) -> tuple[Exported, ...]:
        """What goes when the latest `keep` stay; the best stays too."""
        return tuple(old for old in self.exported[:-keep] if self.best is None or old.folder != self.best.folder)

    def without(self, gone: tuple[Exported, ...]) -> CheckpointIndex:
        return CheckpointIndex(tuple(known for known in self.exported if known not in gone), self.best)


def export_due(step: int, steps: int, every: int) -> bool:
    """Whether the model is exported after `step` of `steps`; the last one always is."""
    return step > 0 and (step >= steps or (every > 0 and step % every == 0))


class Checkpoints:
    """The folder `checkpoints/` of a run and its index `checkpoints.json`; with `artifacts` also those in storage."""

    def __init__(self, root: Path, keep: int, artifacts: Artifacts | None = None) -> None:
        self._root = root
        self._keep = keep
        self._artifacts = artifacts
        if artifacts is not None:
            artifacts.bring_index(root / INDEX)
        self.index = _read(root / INDEX)

    @property
    def latest(self) -> str | None:
        """Where the latest checkpoint lies: its folder, or its place in storage."""
        latest = self.index.latest
        if latest is None:
            return None
        if self._artifacts is not None:
            return self._artifacts.checkpoint_location(latest.folder)
        return str(self._root / latest.folder)

    def rewind(self, step: int) -> None:
        """A run that goes on from `step` makes later checkpoints anew: they leave the index (folders are replaced)."""
        known = tuple(e for e in self.index.exported if e.step <= step)
        best = self.index.best if self.index.best is not None and self.index.best.step <= step else None
        self._write(CheckpointIndex(known, best))
        self._tidy()

    def is_better(self, reward: float | None) -> bool:
        """Whether a model with this validation reward is the best so far."""
        best = self.index.best
        return reward is not None and (best is None or best.reward is None or reward > best.reward)

    def export(self, step: int, weights: Path, reward: float | None, *, version: str, is_best: bool) -> None:
        """Copy the pushed weights to a folder of their own and let surplus folders go."""
        folder = self._root / f"step-{step:06d}"
        self._root.mkdir(parents=True, exist_ok=True)
        export_weights(weights, folder)
        if self._artifacts is not None:
            self._artifacts.put_checkpoint(folder, version)
        index = self.index.adding(Exported(folder.name, step, reward), is_best=is_best)
        gone = index.surplus(self._keep)
        self._write(index.without(gone))
        for old in gone:
            shutil.rmtree(self._root / old.folder, ignore_errors=True)
        self._tidy()

    def _tidy(self) -> None:
        if self._artifacts is not None:
            kept = {known.folder for known in (*self.index.exported, self.index.best) if known is not None}
            self._artifacts.keep_checkpoints(sorted(kept))

    def _write(self, index: CheckpointIndex) -> None:
        self.index = index
        if not self._root.is_dir():
            return
        temporary = self._root / f".{INDEX}.part"
        data = {
            "exported": [asdict(known) for known in index.exported],
            "latest": asdict(index.latest) if index.latest else None,
            "best": asdict(index.best) if index.best else None,
        }
        temporary.write_text(json.dumps(data, indent=2))
        flush(temporary)
        temporary.replace(self._root / INDEX)
        flush(self._root)
        if self._artifacts is not None:
            self._artifacts.put_index(self._root / INDEX)


def _read(path: Path) -> CheckpointIndex:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return CheckpointIndex()
    best = data["best"]
    return CheckpointIndex(tuple(Exported(**known) for known in data["exported"]), Exported(**best) if best else None)
