"""Child processes of a run: start, wait until they serve, restart what may be restarted, end them all."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kitestring_api.names import EXIT_OK, EXIT_STOPPED, EXIT_USER
from kitestring_cli.descendants import become_subreaper, kill_descendants
from kitestring_cli.parent_watch import ENV_PARENT_FD

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long a part may take until it serves: torch on a busy machine needs most of it."""
STOP_SECONDS = 5.0
"""How long a part may take to end after SIGTERM before it is killed."""
SAVE_SECONDS = 60.0
"""The same for the trainer, which first saves what it has."""
RESTARTS = 5
"""A part that crashed so often is not started again: the run ends."""


@dataclass(frozen=True)
class Part:
    """One process of a run."""

    name: str
    """Also the name of its log."""
    arguments: tuple[str, ...]
    """Of the `kitestring` command."""
    log: Path
    restartable: bool
    """Whether the run goes on without it for a moment; the trainer is not."""
    stop_seconds: float = STOP_SECONDS
    """How long it may take to end after SIGTERM."""


class PartFailedError(Exception):
    """A part ended by itself and cannot be started again. `exit_code` is negative for a signal."""

    def __init__(self, part: Part, exit_code: int) -> None:
        how = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        super().__init__(f"{part.name} ended with {how}; its last lines:\n{last_lines(part.log)}")
        self.part = part
        self.exit_code = exit_code


def last_lines(path: Path, count: int = 15) -> str:
    """The last `count` lines of a log, indented."""
    if not path.exists():
        return "  (no log)"
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return "\n".join(f"  {line}" for line in lines) or "  (empty log)"


class _Output:
    """Standard output of a part: the line that says where it listens, everything else into its log."""

    def __init__(self, stream: IO[bytes], log_file: Path) -> None:
        self._settled = threading.Event()
        self.listening: Mapping[str, str] = {}
        self._thread = threading.Thread(target=self._pump, args=(stream, log_file), daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> Mapping[str, str]:
        """URLs by port name; empty when the stream ended, or the time was up, before they were printed."""
        self._settled.wait(seconds)
        return self.listening

    def _pump(self, stream: IO[bytes], log_file: Path) -> None:
        with stream, log_file.open("ab", buffering=0) as sink:
            for line in stream:
                if not self.listening and line.startswith(b'{"listening"'):
                    self.listening = json.loads(line)["listening"]
                    self._settled.set()
                else:
                    sink.write(line)
        self._settled.set()


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    output: _Output
    restarts: int = 0


class Supervisor:
    """Owns the children of this process. Use as a context: leaving it ends every one of them, whatever happened.

    Each child leads a session of its own, so that Ctrl-C of the terminal reaches only us and the children end in order.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._read_end = -1
        self._write_end = -1

    def __enter__(self) -> Supervisor:
        become_subreaper()
        # Only we hold the write end: when we die in any way, the children see the read end close.
        self._read_end, self._write_end = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            kill_descendants()
            os.close(self._read_end)
            os.close(self._write_end)

    def start(self, part: Part) -> None:
        """Start `part`; `wait_until_listening` tells when it serves."""
        process = self._spawn(part)
        assert process.stdout is not None
        self._running[part.name] = _Running(part, process, _Output(process.stdout, part.log))

    def wait_until_listening(self, name: str) -> Mapping[str, str]:
        """URLs by port name, as the part printed them; PartFailedError when it ended instead or took too long."""
        running = self._running[name]
        listening = running.output.wait(START_SECONDS)
        if not listening:
            raise PartFailedError(running.part, self._exit_code(running))
        return listening

    def poll(self) -> list[str]:
        """Look after the children: restart crashed ones that may be; returns what happened, a line each.

        Raises PartFailedError for one that may not be restarted. A child that ended with 0, or because it was asked to,
        is forgotten.
        """
        events: list[str] = []
        for name, running in list(self._running.items()):
            code = running.process.poll()
            if code is None:
                continue
            if code in (EXIT_OK, EXIT_STOPPED):
                del self._running[name]
                continue
            if code == EXIT_USER or not running.part.restartable or running.restarts >= RESTARTS:
                raise PartFailedError(running.part, code)
            self._kill_orphans()
            events.append(f"{name} ended with {code}: started again ({running.restarts + 1} of {RESTARTS})")
            restarts = running.restarts + 1
            self.start(running.part)
            self._running[name].restarts = restarts
        return events

    def ended(self, name: str) -> bool:
        """Whether the part ended well (anything else raises in `poll`)."""
        return name not in self._running

    def terminate(self, name: str) -> None:
        """Ask one part to end; `ended` tells when it has."""
        if name in self._running:
            self._running[name].process.terminate()

    def stop(self) -> None:
        """End all parts one after the other, the last started first: each may still speak to those before it."""
        for running in reversed(list(self._running.values())):
            if running.process.poll() is None:
                running.process.terminate()
            try:
                running.process.wait(running.part.stop_seconds)
            except subprocess.TimeoutExpired:
                log.warning("%s did not end within %.0f s: killed", running.part.name, running.part.stop_seconds)
                running.process.kill()
                running.process.wait()
        self._running.clear()

    def pids(self) -> dict[str, int]:
        """Process id of each running part."""
        return {name: running.process.pid for name, running in self._running.items()}

    def _spawn(self, part: Part) -> subprocess.Popen[bytes]:
        part.log.parent.mkdir(parents=True, exist_ok=True)
        with part.log.open("ab") as sink:
            return subprocess.Popen(
                [sys.executable, "-m", "kitestring_cli", *part.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, ENV_PARENT_FD: str(self._read_end)},
                pass_fds=(self._read_end,),
                start_new_session=True,
            )

    @staticmethod
    def _exit_code(running: _Running) -> int:
        try:
            return running.process.wait(1) or 1
        except subprocess.TimeoutExpired:
            return 1

    def _kill_orphans(self) -> None:
        """What a crashed part left behind has come to us; nothing of it may go on."""
        kill_descendants(spare=[running.process.pid for running in self._running.values()])
