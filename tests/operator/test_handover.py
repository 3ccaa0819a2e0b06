"""An operator that is asked to end hands over at once: runs do not wait for the end of its Lease."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench.operator.api_server import ApiServer
from kitestring_api.names import EXIT_OK
from tests.operator.operator_process import last_words, operator, watched

SOON_SECONDS = 3.0
"""Less than the five that kopf takes to end, and than the fifteen of the Lease."""


async def test_the_lease_is_given_back_at_once(server: ApiServer, tmp_path: Path) -> None:
    async with operator(tmp_path, 3600.0, elected=True) as process:
        await watched(server, "Pod")
        assert holder(server) != ""
        begun = time.monotonic()
        process.terminate()
        async with asyncio.timeout(SOON_SECONDS):
            while holder(server):  # noqa: ASYNC110 (the API server in memory tells nobody)
                await asyncio.sleep(0.01)
        code, said = await last_words(process)
        assert code == EXIT_OK, said
        assert time.monotonic() - begun < SOON_SECONDS


def holder(server: ApiServer) -> str:
    """Who holds the Lease."""
    (lease,) = server.store.of_kind("Lease")
    return str(lease["spec"]["holderIdentity"])
