"""The process that ends Ray's processes when the trainer is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kitestring_trainer.verl_backend import cluster, reaper


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def start(lines):
    command = [sys.executable, "-I", "-S", reaper.__file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    process.stdin.write("".join(f"{line}\n" for line in lines))
    process.stdin.flush()
    return process


def test_kills_what_it_was_told_of_when_its_starter_is_gone(sleeper):
    process = start([f"{sleeper.pid} {reaper.start_time(sleeper.pid)}", "999999999 1"])
    assert sleeper.poll() is None
    process.communicate()  # closes its standard input, as the kernel does for a process that was killed
    assert process.returncode == 0
    assert sleeper.wait(30) == -signal.SIGKILL


def test_spares_a_later_process_of_the_same_number(sleeper):
    process = start([f"{sleeper.pid} 1"])
    process.communicate()
    assert process.returncode == 0
    assert sleeper.poll() is None


def test_folders_of_killed_trainers_are_removed(monkeypatch, tmp_path, sleeper):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    for name in (f"kitestring-{gone.pid}-abc", f"kitestring-{os.getpid()}-abc", "kitestring-notes"):
        (tmp_path / name).mkdir()
    cluster._remove_abandoned_folders()
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == [f"kitestring-{os.getpid()}-abc", "kitestring-notes"]
