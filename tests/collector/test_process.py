"""The collector as a process: its start, its end, and kill -9."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.collector import server
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.collector.server import serve_until
from kitestring_rollout.storage import DirectoryStore
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.exporter import GroupCommitExporter
from kitestring_rollout.traces.reader import read_attempts
from tests.traces.rollouts import call, encoded, identity

SERVE = """
import asyncio, sys
from kitestring_rollout.collector import server
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.collector.server import serve
asyncio.run(serve(CollectorConfig.model_validate_json(sys.argv[1])))
"""


def config_of(folder: Path, **changes: object) -> CollectorConfig:
    (folder / "credential").write_text("trusted\n")
    values = {
        "store": {"kind": "directory", "path": str(folder / "store")},
        "credential_file": str(folder / "credential"),
    }
    return CollectorConfig.model_validate({**values, **changes})


@asynccontextmanager
async def process(config: CollectorConfig) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A collector process and its URL."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, config.model_dump_json(), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert started.stdout is not None
        line = await asyncio.wait_for(started.stdout.readline(), 60)
        yield started, json.loads(line)["listening"]["otlp"]
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    config, acknowledged = config_of(tmp_path), 0
    async with process(config) as (collector, url):
        async with GroupCommitExporter(
            f"{url}/v1/traces", credential="trusted", linger_seconds=0, deadline_seconds=3
        ) as exporter:
            futures = []
            for number in range(1, 120):
                of = identity(number)
                futures.append([exporter.submit(span) for span in encoded([call(1, identity=of)], of)])
                await asyncio.sleep(0)
                if number == 60:
                    await futures[5][0]
                    collector.kill()
        kept = set()
        for number, spans in enumerate(futures, start=1):
            if all(future.exception() is None for future in spans):
                kept.add(identity(number).attempt)
        acknowledged = len(kept)
    assert 0 < acknowledged < 119
    store = DirectoryStore(tmp_path / "store")
    found = {one.attempt for one in read_attempts(store) if isinstance(one, ProvenAttempt)}
    assert kept <= found
    for info in store.list():
        ExportTraceServiceRequest.FromString(store.get(info.key))


async def test_a_restarted_collector_takes_what_the_killed_one_did_not(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    config = config_of(tmp_path, listen={"port": port})
    of = identity()
    first, second, ended = encoded([call(1), call(2)], of)
    async with GroupCommitExporter(f"http://127.0.0.1:{port}/v1/traces", credential="trusted") as exporter:
        async with process(config) as (collector, _):
            await exporter.submit(first)
            collector.kill()
            await collector.wait()
            waiting = exporter.submit(second)
        async with process(config):
            await waiting
            await exporter.submit(ended)
    (proven,) = read_attempts(DirectoryStore(tmp_path / "store"))
    assert isinstance(proven, ProvenAttempt)


async def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    async with process(config_of(tmp_path)) as (collector, url), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        collector.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(collector.wait(), 30) == 0


async def refused(config: CollectorConfig) -> str:
    with pytest.raises(UserMistakeError) as caught:
        await serve_until(config, asyncio.Event())
    return str(caught.value)


async def test_mistakes_are_named(tmp_path: Path) -> None:
    assert "credential_file: cannot read" in await refused(config_of(tmp_path, credential_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n")
    assert "must hold one line" in await refused(config_of(tmp_path, credential_file=str(tmp_path / "empty")))
    (tmp_path / "same").write_text("trusted")
    assert "same credential" in await refused(config_of(tmp_path, agent_credential_file=str(tmp_path / "same")))
    (tmp_path / "file").write_text("")
    assert "store:" in await refused(config_of(tmp_path, store={"kind": "directory", "path": str(tmp_path / "file")}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"listen.port: 127.0.0.1:{port} is taken" in await refused(config_of(tmp_path, listen={"port": port}))


async def test_asked_to_end_it_finishes_the_requests_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entered, gate = threading.Event(), threading.Event()

    class Slow(DirectoryStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            entered.set()
            assert gate.wait(20)
            super().put(key, data, if_absent=if_absent)

    monkeypatch.setattr(server, "open_store", lambda _: Slow(tmp_path / "store"))
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_until(config_of(tmp_path), stop))
    while not (printed := capsys.readouterr().out):  # noqa: ASYNC110 (what is printed has no event)
        await asyncio.sleep(0.01)
    async with GroupCommitExporter(
        json.loads(printed)["listening"]["otlp"] + "/v1/traces", credential="trusted", linger_seconds=0
    ) as exporter:
        span = exporter.submit(encoded([call(1)], identity())[0])
        await asyncio.to_thread(entered.wait, 20)
        stop.set()
        await asyncio.sleep(0.05)
        assert not serving.done()
        gate.set()
        await span
        await serving
        assert exporter.counts.retries == 0
