"""Kueue comes to a cluster and leaves it: the process ends with a line that says so, and the next one goes on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from bench.operator.api_server import SERVED, ApiServer, served
from bench.operator.store import Store
from kitestring_api.names import EXIT_FAILED
from kitestring_operator.cluster.kinds import KINDS
from tests.operator.documents import SETTINGS

WORKLOADS = KINDS["Workload"].path(None)
RUN = (
    "import logging, sys\nfrom pathlib import Path\nfrom kitestring_operator import main\n"
    "logging.basicConfig(format='%(message)s')\nsys.exit(main.run(Path(sys.argv[1]), '127.0.0.1', 0))"
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    found = ApiServer(Store())
    app = web.Application()
    app.add_routes(found.routes())
    async with served(app) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
            "users": [{"name": "here", "user": {}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        yield found
        found.stop()


@asynccontextmanager
async def operator(folder: Path, resync_seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    alone = SETTINGS.leader_election.model_copy(update={"enabled": False})
    settings = SETTINGS.model_copy(update={"leader_election": alone, "resync_seconds": resync_seconds})
    (folder / "settings.json").write_text(settings.model_dump_json(by_alias=True, exclude_none=True))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, str(folder / "settings.json")),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"KUBECONFIG": str(folder / "kubeconfig")},
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
