"""The Lease is held for as long as an operator acts, and given back at once when that is asked to end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench.operator.api_server import ApiServer
from kitestring_api.names import EXIT_OK
from tests.operator.operator_process import LEASE_SECONDS, last_words, operator, watched

SOON_SECONDS = 2.5
"""Less than the five that kopf takes to end, and than the three of the Lease here."""


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


async def test_the_lease_is_kept_through_a_first_list_that_takes_longer(
    server: ApiServer, tmp_path: Path, delays: dict[str, float]
) -> None:
    """Else two operators on a large cluster take it from each other for ever, and nothing is done."""
    delays["/api/v1/pods"] = LEASE_SECONDS + 2.0
    (tmp_path / "other").mkdir()
    async with operator(tmp_path, 3600.0, elected=True) as first:
        await held(server)
        (tmp_path / "other" / "kubeconfig").write_text((tmp_path / "kubeconfig").read_text())
        async with operator(tmp_path / "other", 3600.0, elected=True) as second:
            await watched(server, "Pod")
            assert transitions(server) == 0
            assert first.returncode is second.returncode is None


async def held(server: ApiServer) -> None:
    async with asyncio.timeout(20):
        while not [*server.store.of_kind("Lease")]:  # noqa: ASYNC110 (the API server in memory tells nobody)
            await asyncio.sleep(0.01)


def transitions(server: ApiServer) -> int:
    """How often the Lease went from one to another."""
    (lease,) = server.store.of_kind("Lease")
    return int(lease["spec"]["leaseTransitions"])


def holder(server: ApiServer) -> str:
    """Who holds the Lease."""
    (lease,) = server.store.of_kind("Lease")
    return str(lease["spec"]["holderIdentity"])
