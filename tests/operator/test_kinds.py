"""Kueue comes to a cluster and leaves it: the process ends with a line that says so, and the next one goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.operator.api_server import SERVED, ApiServer
from kitestring_api.names import EXIT_FAILED
from kitestring_operator.cluster.kinds import KINDS
from tests.operator.operator_process import last_words, operator, watched

WORKLOADS = KINDS["Workload"].path(None)


@pytest.mark.parametrize("hears", ["its watch", "a resync"])
async def test_kueue_is_removed(hears: str, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVED, WORKLOADS, KINDS["Workload"])
    async with operator(tmp_path, 0.3 if hears == "a resync" else 3600.0) as process:
        await watched(server, "Workload")
        monkeypatch.delitem(SERVED, WORKLOADS)
        if hears == "its watch":
            server.cut("Workload")
        code, said = await last_words(process)
    assert (code, len(said)) == (EXIT_FAILED, 1), said
    assert "removed" in said[0] and "this process ends" in said[0]
    server.cut("Workload")
    async with operator(tmp_path, 3600.0) as process:
        await watched(server, "Job")
        assert not server.is_watched("Workload") and process.returncode is None


async def test_kueue_is_installed(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operator(tmp_path, 0.3) as process:
        await watched(server, "Job")
        monkeypatch.setitem(SERVED, WORKLOADS, KINDS["Workload"])
        code, said = await last_words(process)
    assert code == EXIT_FAILED
    assert said == ["Kueue has been installed: this process ends, the next one watches it"]
    async with operator(tmp_path, 3600.0):
        await watched(server, "Workload")
