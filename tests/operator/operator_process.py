"""Operators as processes of their own, against the API server in memory of the benchmarks."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.operator.api_server import ApiServer
from tests.operator.documents import SETTINGS

LEASE_SECONDS = 3
RUN = (
    "import logging, sys\nfrom pathlib import Path\nfrom kitestring_operator import main\n"
    "logging.basicConfig(format='%(message)s')\nsys.exit(main.run(Path(sys.argv[1]), '127.0.0.1', 0))"
)


@asynccontextmanager
async def operator(
    folder: Path, resync_seconds: float, *, elected: bool = False, namespaces: tuple[str, ...] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of several (`elected`) or alone."""
    changes = {"enabled": elected, "namespace": "system", "lease_seconds": LEASE_SECONDS, "renew_seconds": 1.0}
    election = SETTINGS.leader_election.model_copy(update=changes)
    given = {"leader_election": election, "resync_seconds": resync_seconds, "namespaces": namespaces}
    settings = SETTINGS.model_copy(update=given)
    (folder / "settings.json").write_text(settings.model_dump_json(by_alias=True, exclude_none=True))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, str(folder / "settings.json")),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"KUBECONFIG": str(folder / "kubeconfig"), "POD_NAME": folder.name},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def last_words(process: asyncio.subprocess.Process) -> tuple[int | None, list[str]]:
    """Exit code, and the lines that it logged."""
    async with asyncio.timeout(20):
        _, said = await process.communicate()
    return process.returncode, said.decode().splitlines()


async def watched(server: ApiServer, kind: str) -> None:
    async with asyncio.timeout(20):
        while not server.is_watched(kind):  # noqa: ASYNC110 (a watch says nothing of itself)
            await asyncio.sleep(0.01)
