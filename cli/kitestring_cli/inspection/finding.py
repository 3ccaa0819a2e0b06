"""From what a user types for RUN to the folder of a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kitestring_api.errors import UserMistakeError
from kitestring_cli.run.folder import RunFolder, open_run_folder

_BEGAN = re.compile(r"(?P<name>.+)-(?P<began>\d{8}-\d{6})")
"""Name of a run folder: the TrainingRun's name and the time at which the run began."""
_SHOWN = 5
"""Runs that a message names."""


def run_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds RUN and `--runs` to a command; `find_run` takes both."""
    runs = click.option(
        "--runs",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="Folder of runs, where RUN is a name.",
    )
    return click.argument("run")(runs(command))


def find_run(run: str, runs: Path) -> RunFolder:
    """The folder `run`, or the run of that name below `runs`, or the newest run of the TrainingRun of that name.

    Raises UserMistakeError when there is none.
    """
    if not run:
        raise UserMistakeError(f"RUN is empty; {_remedy(run, runs)}")
    for path in (Path(run), runs / run):
        if path.is_dir():
            return open_run_folder(path)
        if path.is_symlink():
            raise UserMistakeError(
                f"{path}: the run that it points to is gone ({path.readlink()}); {_remedy(run, runs)}"
            )
    newest = max((known for known in _known(runs) if _name(known) == run), default=None)
    if newest is None:
        raise UserMistakeError(f"{run}: no such run; {_remedy(run, runs)}")
    return open_run_folder(runs / newest)


def _remedy(run: str, runs: Path) -> str:
    known = sorted(_known(runs), key=_began, reverse=True)
    if not known:
        return f"there is none below {runs}/ either: give the folder of a run, or --runs FOLDER"
    names = dict.fromkeys([*known, *(_name(folder) for folder in known)])
    near = difflib.get_close_matches(run, names, n=1)
    shown = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
    return (f"did you mean {near[0]}? " if near else "") + f"runs below {runs}/: {shown}"


def _known(runs: Path) -> list[str]:
    try:
        return [entry.name for entry in runs.iterdir() if not entry.is_symlink() and (entry / "config").is_dir()]
    except OSError:
        return []


def _name(folder: str) -> str:
    match = _BEGAN.fullmatch(folder)
    return match["name"] if match else folder


def _began(folder: str) -> str:
    match = _BEGAN.fullmatch(folder)
    return match["began"] if match else ""
