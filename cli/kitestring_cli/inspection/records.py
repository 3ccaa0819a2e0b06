"""What a run has written down: configuration, result, figures, plans, commits, samples. Read only."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import orjson
import zstandard
from pydantic import ValidationError

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import MODE_TRAIN, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED, PREFIX_TRACES
from kitestring_cli.run.folder import RunFolder
from kitestring_rollout.protocol.gateway_admin import Mode
from kitestring_rollout.storage import (
    DirectoryStore,
    DirectoryStoreConfig,
    ObjectMissing,
    ObjectStore,
    StoreUnavailable,
    open_store,
)
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.ledger import COMMITS, INCARNATIONS, PLANS, SAMPLES
from kitestring_trainer.plan import LETTERS, StepPlan, plan_name
from kitestring_trainer.samples.batches import SampleRecord

MODES: Final[tuple[Mode, ...]] = (MODE_TRAIN, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED)
"""Modes of which a run keeps plans and commits."""


@dataclass(frozen=True)
class Figures:
    """The lines of `metrics.jsonl`, put together for each step and in the order of the steps, from 1."""

    lines: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    """What was left out: a trainer that is killed while it writes leaves half a line at the end."""


class RunRecords:
    """Every method may raise UserMistakeError: a store that cannot be read, records that are no records."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.config = _config(folder)
        self._store: ObjectStore | None = None

    @property
    def name(self) -> str:
        return self.config.run

    @property
    def store(self) -> ObjectStore:
        """Object storage of the run."""
        if self._store is None:
            with self.reading():
                self._store = _open(self.folder, self.config)
        return self._store

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around everything that reads the store: what it cannot do is the user's to mend."""
        try:
            yield
        except StoreUnavailable as error:
            raise UserMistakeError(f"{self.folder.root}: the run's records cannot be read: {error}") from error

    # --- in object storage ---

    def steps(self, mode: Mode) -> list[int]:
        """The committed steps, in order."""
        return self._numbers(COMMITS + LETTERS[mode], ".json")

    def planned_steps(self, mode: Mode) -> list[int]:
        """The steps that were begun, in order."""
        return self._numbers(PLANS + LETTERS[mode], ".json")

    def commit(self, mode: Mode, step: int) -> StepCommit | None:
        """None: the step was not committed."""
        data = self._json(f"{COMMITS}{plan_name(mode, step)}.json")
        return None if data is None else StepCommit.from_json(data)

    def commits(self, mode: Mode, steps: Sequence[int] | None = None) -> Iterator[StepCommit]:
        """One after another; `steps` None: all."""
        for step in self.steps(mode) if steps is None else steps:
            commit = self.commit(mode, step)
            if commit is not None:
                yield commit

    def plan(self, mode: Mode, step: int) -> tuple[StepPlan, float] | None:
        """The plan, and the unix time at which it was written."""
        data = self._json(f"{PLANS}{plan_name(mode, step)}.json")
        return None if data is None else (StepPlan.from_json(data), float(data["unix_time"]))

    def samples(self, step: int) -> dict[tuple[str, int, int], SampleRecord]:
        """What became of each transition of a training step, by (attempt, seq, choice)."""
        key = f"{SAMPLES}{plan_name(MODE_TRAIN, step)}.jsonl.zst"
        found: dict[tuple[str, int, int], SampleRecord] = {}
        with self.reading():
            try:
                data = self.store.get(key)
            except ObjectMissing:
                return found
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
            for line in io.TextIOWrapper(stream, encoding="utf-8"):
                record = SampleRecord(**orjson.loads(line))
                found[record.attempt, record.seq, record.choice] = record
        return found

    def starts(self) -> int:
        """How often the trainer was started."""
        return len(self._numbers(INCARNATIONS, ".json"))

    def has_traces(self) -> bool:
        """Whether there is any trace object."""
        with self.reading():
            return next(iter(self.store.list(PREFIX_TRACES)), None) is not None

    # --- in the run folder ---

    @cached_property
    def figures(self) -> Figures:
        """Raises UserMistakeError for a line that is none, but for a last one that is cut off."""
        path = self.folder.metrics
        try:
            raw = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return Figures((), ())
        lines: dict[int, dict[str, Any]] = {}
        notes = []
        for number, text in enumerate(raw, start=1):
            try:
                line = orjson.loads(text)
                step = int(line["step"])
            except (orjson.JSONDecodeError, TypeError, KeyError, ValueError) as error:
                if number < len(raw) or text.endswith(b"\n"):
                    raise UserMistakeError(
                        f"{path}:{number}: is no JSON object with a step ({error}); remove the line"
                    ) from error
                notes.append(f"{path}:{number}: cut off, left out (the trainer was killed while it wrote)")
                continue
            lines[step] = lines.get(step, {}) | line
        return Figures(tuple(lines[step] for step in sorted(lines) if step > 0), tuple(notes))

    @cached_property
    def result(self) -> dict[str, Any]:
        """How the run ended; empty while it goes on, and after a kill."""
        path = self.folder.result
        try:
            result = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return {}
        except orjson.JSONDecodeError as error:
            raise UserMistakeError(f"{path}: no JSON ({error}); remove the file, the run is read without it") from error
        return result if isinstance(result, dict) else {}

    # --- inside ---

    def _numbers(self, prefix: str, suffix: str) -> list[int]:
        with self.reading():
            names = [info.key[len(prefix) : -len(suffix)] for info in self.store.list(prefix)]
        return sorted(int(name) for name in names if name.isdecimal())

    def _json(self, key: str) -> dict[str, Any] | None:
        with self.reading():
            try:
                data: dict[str, Any] = orjson.loads(self.store.get(key))
            except ObjectMissing:
                return None
        return data


def _config(folder: RunFolder) -> TrainerConfig:
    path = folder.configs / "trainer.json"
    try:
        return TrainerConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserMistakeError(f"{path}: {where}: {first['msg']}; it was written by another version") from error


def _open(folder: RunFolder, config: TrainerConfig) -> ObjectStore:
    """The store of the run; a folder that was moved or copied has its own with it, and its own credentials."""
    store = config.store
    if isinstance(store, DirectoryStoreConfig):
        if not folder.store.is_dir():
            raise UserMistakeError(f"{folder.store}: missing; the run left no records, or they were removed")
        return DirectoryStore(folder.store)
    keys = {name: _here(folder, getattr(store, name)) for name in ("access_key_file", "secret_key_file")}
    try:
        return open_store(store.model_copy(update=keys))
    except OSError as error:
        raise UserMistakeError(f"{error.filename}: credential of the run's storage: {error.strerror}") from error


def _here(folder: RunFolder, path: Path) -> Path:
    return path if path.exists() else folder.secrets / path.name
