"""Processes below this one: find them, end them. Orphans come back to us because we are a child subreaper."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphaned descendants become our children instead of init's, so that none escapes (Linux prctl(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def kill_descendants(*, spare: Collection[int] = ()) -> int:
    """SIGKILL everything below this process but `spare` and what is below those; returns how many were killed.

    Repeats, because a process may fork between the look and the kill.
    """
    killed: set[int] = set()
    while True:
        targets = [process for process in _descendants(spare) if process.is_running()]
        if not targets:
            return len(killed)
        for process in targets:
            try:
                process.send_signal(signal.SIGKILL)
                killed.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        _reap(targets)
        # A killed process of a dying tree needs a moment in the kernel before it is gone.
        time.sleep(0.01)


def _descendants(spare: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid in spare:
            continue
        found.append(child)
        try:
            found.extend(child.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reap(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            continue
