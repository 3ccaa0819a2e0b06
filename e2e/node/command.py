"""Other programs: run, their output kept, their failure said with its last lines."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from e2e.node import layout


class Failed(Exception):
    """A step did not come to its end; the message says which and why, for a person."""


def run(
    command: Sequence[str | Path],
    *,
    log: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout: float | None = None,
) -> str:
    """Standard output of a command; with `log` both streams go to that file in the cache, and nothing is returned.

    Raises `Failed` with the last lines when the command does not end, within `timeout` seconds, with 0.
    """
    words = [str(word) for word in command]
    environment = {**os.environ, **(env or {})}
    try:
        if log is None:
            done = subprocess.run(
                words,
                cwd=cwd,
                env=environment,
                input=stdin,
                timeout=timeout,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return done.stdout
            said = done.stderr or done.stdout
        else:
            layout.LOGS.mkdir(parents=True, exist_ok=True)
            path = layout.LOGS / f"{log}.log"
            with path.open("w") as file:
                done = subprocess.run(
                    words,
                    cwd=cwd,
                    env=environment,
                    input=stdin,
                    timeout=timeout,
                    stdout=file,
                    stderr=file,
                    text=True,
                    check=False,
                )
            if done.returncode == 0:
                return ""
            said = path.read_text(errors="replace")
    except subprocess.TimeoutExpired as expired:
        raise Failed(f"{' '.join(words[:4])} … did not end within {timeout:g} s") from expired
    except FileNotFoundError as missing:
        raise Failed(f"{words[0]} is not installed") from missing
    tail = "\n".join(said.strip().splitlines()[-25:])
    raise Failed(f"{' '.join(words[:6])} … ended with {done.returncode}:\n{tail}")


def succeeds(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 60) -> bool:
    """Whether a command ends with 0."""
    try:
        run(command, env=env, timeout=timeout)
    except Failed:
        return False
    return True


def digest(parts: Iterable[str | Path]) -> str:
    """Twelve hexadecimal digits that change when a text, a file, or a file below a folder changes."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            files = sorted(part.rglob("*")) if part.is_dir() else [part]
            for file in files:
                if file.is_file() and "__pycache__" not in file.parts:
                    whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        else:
            whole.update(part.encode() + b"\0")
    return whole.hexdigest()[:12]


def pipe(producer: Sequence[str | Path], consumer: Sequence[str | Path], env: Mapping[str, str]) -> None:
    """Let one command write what another reads; raises `Failed` when either fails."""
    environment = {**os.environ, **env}
    words = [list(map(str, command)) for command in (producer, consumer)]
    with tempfile.TemporaryFile("w+") as said:
        writer = subprocess.Popen(words[0], env=environment, stdout=subprocess.PIPE, stderr=said)
        reader = subprocess.run(words[1], env=environment, stdin=writer.stdout, stdout=said, stderr=said, check=False)
        assert writer.stdout is not None
        writer.stdout.close()
        if writer.wait() or reader.returncode:
            said.seek(0)
            tail = "\n".join(said.read().splitlines()[-25:])
            raise Failed(f"{' '.join(words[0][:3])} … | {' '.join(words[1][:3])} … failed:\n{tail}")
