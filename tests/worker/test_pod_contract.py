"""A worker whose agents run in another container, under the static launcher, holds the executors' contract too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.worker.conftest import PATH, StartWorker, WorkerHere, worker_config
from tests.worker.executor_contract import ExecutedAgentContract, ExecutorContract, Setup
from tests.worker.fake_queue import FakeQueue
from tests.worker.pod import Container, PodApart, PodHere, built_launcher, in_pod


@pytest.fixture
async def start_executor(
    tmp_path: Path, queue: FakeQueue, preload: list[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StartWorker]:
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.SETTLE_SECONDS", 0.02)
    monkeypatch.setattr("kitestring_rollout.worker.gateway_check.WAIT_SECONDS", 0.5)
    started: list[PodHere | PodApart] = []

    async def start(setup: Setup) -> WorkerHere:
        config = in_pod(worker_config(tmp_path, queue.url, setup, preload), tmp_path)
        container = Container((built_launcher(), "--socket", str(config.launcher_socket)), {"PATH": PATH}, tmp_path)
        pod = PodApart(config, container) if setup.apart else PodHere(config, container)
        started.append(pod)
        await pod.begin()
        return pod

    yield start
    await queue.end()
    for pod in started:
        await pod.stop()
        assert await pod.container.ended() in (0, 3, 143)


class TestPod(ExecutorContract):
    def path_is_gone(self, path: str) -> bool:
        return not Path(path).exists()


class TestPodWithCommands(ExecutedAgentContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        (tmp_path / "folder").mkdir()
        return str(tmp_path / "folder")
