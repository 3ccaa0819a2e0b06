"""Ends Ray's processes when the process that started them is killed. Runs as a process of its own; Linux.

Started with the isolated, site-less interpreter (a few milliseconds). Standard input: lines of "pid start-time";
its end means that the starter is gone, however it went. Ray's agents by themselves stay for a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def start_time(pid: int) -> str | None:
    """The kernel's start time of a process, which tells it from a later one of the same number; None if gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - no pathlib here
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched = [line.split() for line in sys.stdin]
    for pid, started in watched:
        if start_time(int(pid)) == started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    main()
