"""End with the parent: a part whose supervisor dies, even by SIGKILL, takes all its descendants with it."""

from __future__ import annotations

import os
import threading

from kitestring_cli.descendants import become_subreaper, kill_descendants

ENV_PARENT_FD = "KITESTRING_PARENT_FD"
"""Descriptor of a pipe whose other end only the supervisor holds: it reads as closed when the supervisor is gone."""


def watch_parent() -> None:
    """Start watching, if a supervisor asked for it; also becomes a subreaper, so that orphans can be found."""
    descriptor = os.environ.pop(ENV_PARENT_FD, None)
    if descriptor is None:
        return
    become_subreaper()
    fd = int(descriptor)
    os.set_inheritable(fd, False)
    threading.Thread(target=_end_with, args=(fd,), name="parent-watch", daemon=True).start()


def _end_with(fd: int) -> None:
    os.read(fd, 1)
    kill_descendants()
    os._exit(1)
