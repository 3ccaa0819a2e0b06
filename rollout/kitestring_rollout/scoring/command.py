"""A scorer of the user's: a command that runs once per attempt, apart from the agent."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil

from kitestring_rollout.scoring.value import ScoreError, shown

OUTPUT_BYTES = 65536
ERROR_BYTES = 4096
CHUNK = 65536
LEFTOVER_SECONDS = 2.0
_PLAIN_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_NOT_FINITE = re.compile(r"[-+]?(nan|inf|infinity)", re.IGNORECASE)
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def command_reward(
    command: Sequence[str], question: Mapping[str, Any], *, seconds: float, working_dir: Path | None = None
) -> Any:
    """Gives `question` as JSON on standard input, returns what the last line says: a number, or anything else that
    stands where the reward should. ScoreError when the command fails, is too slow, or says nothing.

    Its environment holds PATH, HOME, LANG and TMPDIR and nothing else of this process. When it has ended, or is ended
    at the time limit, so is what it started. At most as many commands run at once as there are cores.
    """
    loop = asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(os.cpu_count() or 1))
    async with slots:
        code, out, err = await _run(command, json.dumps(question).encode(), seconds, working_dir)
    if code != 0:
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise ScoreError(f"the scorer {shown(command[0])} ended with {how}: {_last_line(err) or 'no word on stderr'}")
    return read_reward(_last_line(out))


def read_reward(line: str | None) -> Any:
    """The reward that a scorer's last line says, of whatever type; ScoreError when it says none. Pure."""
    if line is None:
        raise ScoreError('the scorer printed nothing; its last line must be a number or {"reward": number}')
    if _PLAIN_NUMBER.fullmatch(line):
        return float(line)
    if _NOT_FINITE.fullmatch(line):
        return math.inf if "i" in line.lower() else math.nan
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        raise ScoreError(f"the scorer's last line is no number: {shown(line)}") from None
    if isinstance(said, dict):
        if "reward" not in said:
            raise ScoreError(f"the scorer's last line has no field reward: {shown(line)}")
        return said["reward"]
    return said


def _last_line(data: bytes) -> str | None:
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), None)


async def _run(
    command: Sequence[str], given: bytes, seconds: float, working_dir: Path | None
) -> tuple[int, bytes, bytes]:
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    # Pipes and file of our own: asyncio's Process.wait would wait for whatever holds the pipes of the process.
    with tempfile.TemporaryFile() as question:
        question.write(given)
        question.seek(0)
        out, err = os.pipe(), os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=question,
                stdout=out[1],
                stderr=err[1],
                env={**environment, "LANG": "C.UTF-8"},
                cwd=working_dir,
                start_new_session=True,
            )
        except OSError as error:
            os.close(out[0])
            os.close(err[0])
            raise ScoreError(f"the scorer {shown(command[0])} cannot be started: {error.strerror}") from None
        finally:
            os.close(out[1])
            os.close(err[1])
    reading = (
        asyncio.create_task(_tail(out[0], OUTPUT_BYTES)),
        asyncio.create_task(_tail(err[0], ERROR_BYTES)),
    )
    try:
        async with asyncio.timeout(seconds):
            code = await process.wait()
    except TimeoutError:
        raise ScoreError(f"the scorer {shown(command[0])} took longer than {seconds:g} s") from None
    finally:
        _kill(process.pid)
        await process.wait()
        _, unread = await asyncio.wait(reading, timeout=LEFTOVER_SECONDS)
        for task in unread:  # a process that left both the group and the tree holds the pipe
            task.cancel()
    if unread:
        raise ScoreError(f"the scorer {shown(command[0])} left a process that holds its output open")
    return code, reading[0].result(), reading[1].result()


async def _tail(fd: int, size: int) -> bytes:
    """The last `size` bytes that come out of a pipe until it is closed; closes our end."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    kept = bytearray()
    try:
        while data := await reader.read(CHUNK):
            kept += data
            if len(kept) > 2 * size:
                del kept[: len(kept) - size]
    finally:
        transport.close()
    return bytes(kept[-size:])


def _kill(pid: int) -> None:
    """The command's tree and its process group."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        below = []
    for process in below:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
