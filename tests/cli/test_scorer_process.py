"""`kitestring scorer`: a scorer's command beside a local run, and its end with all that it started."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kitestring_cli.scorer_process import _stop

LISTENS = """
import os, socket
listener = socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
"""
STUBBORN = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, file=sys.stderr, flush=True)
{LISTENS}
while True: signal.pause()
"""


@contextmanager
def started(folder: Path, *command: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    (folder / "scorer.json").write_text(
        json.dumps({"command": command, "working_dir": str(folder), "port": port, "env": {"LANG": "C"}})
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kitestring_cli", "scorer", "--config", str(folder / "scorer.json")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield process, port
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("program", [f"{LISTENS}import time; time.sleep(600)", STUBBORN], ids=["meek", "stubborn"])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, program: str) -> None:
    with started(tmp_path, sys.executable, "-c", program) as (process, port):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"listening": {"scorer": f"http://127.0.0.1:{port}"}}
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == (1 if program != STUBBORN else 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not [one for one in below if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_one_that_ends_by_itself_has_failed(tmp_path: Path) -> None:
    with started(tmp_path, "sh", "-c", "echo enough; exit 0") as (process, _):
        assert process.wait(20) == 1
    log = (tmp_path / "log").read_text()
    assert "enough" in log and "the scorer ended by itself with exit code 0" in log


def test_one_that_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    with started(tmp_path, "./judge") as (process, _):
        assert process.wait(20) == 2
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last == "error: the scorer ./judge cannot be started: No such file or directory"


async def test_one_that_has_just_ended_by_itself_may_be_told_to() -> None:
    """Its process is gone a moment before anyone hears of it."""
    process = await asyncio.create_subprocess_exec("true", start_new_session=True)
    await process.wait()
    await _stop(process.pid, asyncio.create_task(process.wait()))
