"""kubectl and helm, as users call them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path


class CommandFailed(AssertionError):
    """A command ended other than with 0; `stderr` is what a user would read."""

    def __init__(self, command: list[str], code: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{' '.join(command)} ended with {code}\n{stdout}{stderr}")
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


@dataclass(frozen=True)
class Kubectl:
    """Calls kubectl against one cluster."""

    binary: Path
    kubeconfig: Path
    namespace: str = ""

    def in_namespace(self, namespace: str) -> Kubectl:
        """The same for another namespace."""
        return replace(self, namespace=namespace)

    def command(self, *arguments: str) -> list[str]:
        """The whole command line."""
        scope = ["--namespace", self.namespace] if self.namespace else []
        return [str(self.binary), "--kubeconfig", str(self.kubeconfig), *scope, *arguments]

    def __call__(self, *arguments: str, stdin: str | None = None, seconds: float = 60) -> str:
        """Standard output. Raises CommandFailed."""
        return call(self.command(*arguments), stdin=stdin, seconds=seconds)

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[int]:
        """A port of this machine that leads to one of a pod or Service (`svc/name`)."""
        command = self.command("port-forward", "--address", "127.0.0.1", target, f":{port}")
        # Into a file, whose end nobody has to read: it says a line for each connection.
        with tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
            try:
                assert process.stdout is not None
                said = process.stdout.readline()
                found = re.search(r"127\.0\.0\.1:(\d+) ->", said)
                if found is None:
                    code = process.wait()
                    stderr.seek(0)
                    raise CommandFailed(command, code, said, stderr.read())
                rest = threading.Thread(target=process.stdout.read, daemon=True)
                rest.start()
                yield int(found[1])
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait()


def call(
    command: list[str],
    *,
    stdin: str | None = None,
    seconds: float = 60,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Standard output of a command. Raises CommandFailed, also when it does not end in time."""
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            command, input=stdin, timeout=seconds, capture_output=True, text=True, check=False, env=environment, cwd=cwd
        )
    except subprocess.TimeoutExpired as expired:
        stdout, stderr = (
            said.decode() if isinstance(said, bytes) else said or "" for said in (expired.stdout, expired.stderr)
        )
        raise CommandFailed(command, -1, stdout, f"{stderr}\nnot ended after {seconds:g} s") from None
    if done.returncode != 0:
        raise CommandFailed(command, done.returncode, done.stdout, done.stderr)
    return done.stdout
