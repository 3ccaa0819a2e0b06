"""The folder of a run: what lies where."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kitestring_api.errors import UserMistakeError

LATEST = "latest"
"""Link below the folder of runs to the newest one."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run; `create` makes those that parts expect to exist."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def configs(self) -> Path:
        return self.root / "config"

    @property
    def resolved(self) -> Path:
        return self.root / "resolved"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def trainer_result(self) -> Path:
        """What the trainer process says of its end; `result` is what the whole run came to."""
        return self.root / "trainer-result.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def secret(self, name: str, value: str) -> Path:
        """Write a secret that only this user may read; a secret that is there stays, so that a resumed run keeps it."""
        path = self.secrets / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(value)
        return path

    def credential(self, name: str) -> Path:
        """A random credential of this run."""
        return self.secret(name, secrets.token_urlsafe(32))


def create_run_folder(runs: Path, name: str, now: datetime) -> RunFolder:
    """A new folder `runs/NAME-YYYYmmdd-HHMMSS`, to which `runs/latest` points. `now` carries its zone."""
    root = runs / f"{name}-{now:%Y%m%d-%H%M%S}"
    try:
        root.mkdir(parents=True)
    except FileExistsError as error:
        raise UserMistakeError(f"{root}: exists already; another run began in the same second, start again") from error
    except OSError as error:
        raise UserMistakeError(f"{root}: {error.strerror}; name another folder with --runs") from error
    folder = RunFolder(root.resolve())
    for path in (folder.configs, folder.resolved, folder.logs, folder.store, folder.weights, folder.scratch):
        path.mkdir()
    folder.secrets.mkdir(mode=0o700)
    link = runs / LATEST
    link.unlink(missing_ok=True)
    link.symlink_to(root.name)
    return folder


def open_run_folder(path: Path) -> RunFolder:
    """The folder of an earlier run. Raises UserMistakeError when it is none."""
    folder = RunFolder(path.resolve())
    if not (folder.configs / "trainer.json").is_file():
        raise UserMistakeError(f"{path}: no folder of a run (it has no config/trainer.json); name one below runs/")
    return folder
