from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from kitestring_rollout.worker.config import WorkerConfig
from kitestring_rollout.worker.main import work
from tests.worker.executor_contract import Setup
from tests.worker.fake_queue import CREDENTIAL, FakeQueue

PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
GONE_SECONDS = 15.0
RUN = (
    "import sys\n"
    "from kitestring_rollout.worker.config import WorkerConfig\n"
    "from kitestring_rollout.worker.main import run\n"
    "sys.exit(run(WorkerConfig.model_validate_json(sys.argv[1])))"
)


def worker_config(folder: Path, url: str, setup: Setup, preload: list[str]) -> WorkerConfig:
    (folder / "credential").write_text(CREDENTIAL + "\n")
    return WorkerConfig.model_validate(
        {
            "run": "run-1",
            "name": "worker-0",
            "queue_url": url,
            "queue_credential_file": folder / "credential",
            "capacity": setup.capacity,
            "agent": {
                "command": setup.command,
                "args": setup.args,
                "env": {"PATH": PATH, **setup.env},
                "working_dir": setup.working_dir,
            },
            "agent_protocol": {**setup.protocol, "preload": preload},
            "limits": setup.limits,
            "scratch_root": folder / "scratch",
            "grace_seconds": setup.grace_seconds,
            "drain_seconds": setup.drain_seconds,
        }
    )


def living(marker: str) -> list[psutil.Process]:
    """Processes named by the marker that are no zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            named = Path(f"/proc/{process.pid}/comm").read_text().strip() == marker
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
    return found


class WorkerHere:
    """A worker as a task of this process: quick to start."""

    def __init__(self, config: WorkerConfig) -> None:
        self.stopping = asyncio.Event()
        self.leasing = asyncio.Event()
        self.urls: dict[str, str] = {}
        self.task = asyncio.create_task(work(config, self._listening, self.stopping))

    def _listening(self, urls: dict[str, str]) -> None:
        self.urls = urls
        self.leasing.set()

    async def begin(self) -> None:
        leasing = asyncio.create_task(self.leasing.wait())
        await asyncio.wait({self.task, leasing}, return_when=asyncio.FIRST_COMPLETED)
        leasing.cancel()
        if self.task.done():
            self.task.result()

    async def stop(self) -> None:
        self.stopping.set()
        await self.task

    async def ended(self) -> int:
        await self.task
        return 0

    def kill(self) -> None:
        raise NotImplementedError("only a worker apart can be killed")

    def processes(self, marker: str) -> list[int]:
        return [process.pid for process in living(marker)]

    async def gone(self, marker: str) -> None:
        give_up = time.monotonic() + GONE_SECONDS
        while alive := living(marker):  # one that ends may have begun another just before
            assert time.monotonic() < give_up, alive
            await asyncio.to_thread(psutil.wait_procs, alive, timeout=1.0)


class WorkerApart(WorkerHere):
    """A worker as a process."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config

    async def begin(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, self.config.model_dump_json(by_alias=True), stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert await self.process.stdout.readline() == b'{"listening": {}}\n'

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()

    async def ended(self) -> int:
        return await self.process.wait()

    def kill(self) -> None:
        self.process.kill()


@pytest.fixture
async def queue() -> AsyncIterator[FakeQueue]:
    fake = FakeQueue()
    await fake.start()
    yield fake
    await fake.stop()


StartWorker = Callable[[Setup], Coroutine[Any, Any, WorkerHere]]


@pytest.fixture
def preload() -> list[str]:
    return []


@pytest.fixture
async def start_executor(tmp_path: Path, queue: FakeQueue, preload: list[str]) -> AsyncIterator[StartWorker]:
    started: list[WorkerHere] = []

    async def start(setup: Setup) -> WorkerHere:
        config = worker_config(tmp_path, queue.url, setup, preload)
        worker = WorkerApart(config) if setup.apart else WorkerHere(config)
        started.append(worker)
        await worker.begin()
        return worker

    yield start
    await queue.end()
    for worker in started:
        await worker.stop()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.SETTLE_SECONDS", 0.02)
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.ALONE_SECONDS", 0.02)
