"""The operator as it runs in a cluster, on one core, with its trainers found on loopback instead of by their Services.

python -m bench.operator.process SETTINGS CORE TRAINERS_PORT
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from aiohttp import connector
from aiohttp.abc import AbstractResolver, ResolveResult

from kitestring_operator import main


class _Loopback(AbstractResolver):
    """Every host name is one port of this machine."""

    port = 0

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None: ...

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [ResolveResult(hostname=host, host="127.0.0.1", port=self.port, family=socket.AF_INET, proto=0, flags=0)]

    async def close(self) -> None: ...


def _end_with_parent() -> None:
    """Whoever started this process holds the other end of its standard input."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settings, core, _Loopback.port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.sched_setaffinity(0, {core})
    setattr(connector, "DefaultResolver", _Loopback)  # noqa: B010 -- it has the type of one class
    sys.exit(main.run(settings, "127.0.0.1", 0))
