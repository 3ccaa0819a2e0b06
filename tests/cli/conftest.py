"""The command line in this process, and made-up runs to point it at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kitestring_cli.main import main
from tests.cli.run_folders import MadeUpRun, make_run


@dataclass
class Said:
    code: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def kitestring(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`kitestring(*arguments)`, as in a pipe of 100 columns, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert "Traceback" not in captured.err
        return Said(ended.value.code, captured.out, captured.err)

    return call


@pytest.fixture
def made(tmp_path: Path) -> MadeUpRun:
    """An empty run below `runs/`."""
    return make_run(tmp_path / "runs")
