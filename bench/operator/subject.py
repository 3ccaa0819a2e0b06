"""An operator process that is measured: started, asked for its own figures, watched from outside, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from kitestring_operator.settings import Settings


class Subject:
    """A running operator."""

    def __init__(
        self, process: asyncio.subprocess.Process, url: str, session: aiohttp.ClientSession, begun: float
    ) -> None:
        self._process = process
        self._url = url
        self._session = session
        self.begun = begun
        """When it was started (time.monotonic)."""

    def cpu_seconds(self) -> float:
        """User and system time so far, all threads."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def peak_mb(self) -> float:
        """Largest resident set so far, in MB."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError("the process has ended")

    async def until(self, done: Callable[[], object], what: str, seconds: float, pause: float = 0.05) -> None:
        """Return once `done()`, a coroutine function or a plain one, says so. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            answer = done()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return
            if self._process.returncode is not None:
                raise RuntimeError(f"the operator ended with {self._process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:g} s for {what}")
            await asyncio.sleep(pause)

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        async with self._session.get(self._url + "/metrics") as response:
            text = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def looked_at(self, kind: str) -> float:
        """Reconciliations of resources of a kind."""
        return await self.metric("kitestring_operator_reconcile_seconds_count", kind=kind)

    async def until_ready(self, seconds: float) -> float:
        """Seconds from its start until it leads and has seen all that is there."""

        async def ready() -> bool:
            async with self._session.get(self._url + "/readyz") as response:
                return response.status == 200 and await self.metric("kitestring_operator_is_leader") == 1

        await self.until(ready, "the operator to be ready", seconds)
        return time.monotonic() - self.begun


@contextlib.asynccontextmanager
async def operator(folder: Path, settings: Settings, url: str) -> AsyncIterator[Subject]:
    """An operator on the last core of this machine, against the API server at `url`."""
    port = int(url.rpartition(":")[2])
    config, kubeconfig = folder / "settings.json", folder / "kubeconfig"
    config.write_text(settings.model_dump_json(by_alias=True, exclude_none=True))
    kubeconfig.write_text(json.dumps(_kubeconfig(url)))
    core = max(os.sched_getaffinity(0))
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"KUBECONFIG": str(kubeconfig), "POD_NAME": f"operator-{time.monotonic_ns()}"}
    environment["MALLOC_ARENA_MAX"] = "2"  # as in the image
    begun = time.monotonic()
    with (folder / "operator.log").open("a") as log:
        command = ["-m", "bench.operator.process", str(config), str(core), str(port)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
        )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the operator ended: {(folder / 'operator.log').read_text()[-2000:]}")
        async with aiohttp.ClientSession() as session:
            listening = json.loads(line)["listening"]["http"]
            yield Subject(process, listening, session, begun)
    finally:
        if process.returncode is None:
            process.terminate()
        code = await process.wait()
    if code != 0:
        raise RuntimeError(f"the operator ended with {code}: {(folder / 'operator.log').read_text()[-2000:]}")


def _kubeconfig(url: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "clusters": [{"name": "bench", "cluster": {"server": url}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "users": [{"name": "bench", "user": {}}],
    }
