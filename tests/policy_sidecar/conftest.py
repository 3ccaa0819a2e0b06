"""A sidecar in the test's own loop, before a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kitestring_rollout.policy_sidecar.config import PolicySidecarConfig
from kitestring_rollout.policy_sidecar.keeper import Keeper
from kitestring_rollout.policy_sidecar.process import running
from kitestring_rollout.storage import DirectoryStore
from kitestring_rollout.storage.published_weights import publish_weights, set_current
from tests.policy_sidecar.engine import Engine

CREDENTIAL = "trainer-secret"


@dataclass
class Pod:
    """One policy-server pod, its trainer's storage beside it."""

    engine: Engine
    root: Path
    http: aiohttp.ClientSession
    url: str = ""
    store: DirectoryStore = field(init=False)
    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        self.store = DirectoryStore(self.root / "store")

    @property
    def folder(self) -> Path:
        return self.root / "weights"

    def publish(self, version: str) -> None:
        """Publish weights that say their version, and make them current."""
        made = self.root / "made" / version
        made.mkdir(parents=True, exist_ok=True)
        (made / "weights").write_text(f"w{version}")
        publish_weights(self.store, made, version)
        set_current(self.store, version)

    def config(self, **changes: Any) -> PolicySidecarConfig:
        (self.root / "credential").write_text(CREDENTIAL + "\n")
        return PolicySidecarConfig.model_validate(
            {
                "server": self.engine.url,
                "store": {"kind": "directory", "path": str(self.root / "store")},
                "folder": str(self.folder),
                "credential_file": str(self.root / "credential"),
                "poll_seconds": 0.02,
                **changes,
            }
        )

    @asynccontextmanager
    async def sidecar(self, **changes: Any) -> AsyncIterator[None]:
        async with running(self.config(**changes)) as (self.keeper, _, self.url):
            yield

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith("{") else text

    async def push(self, version: str, credential: str = CREDENTIAL) -> tuple[int, Any]:
        async with self.http.post(
            f"{self.url}/kitestring/v1/weights",
            json={"version": version},
            headers={"Authorization": f"Bearer {credential}"},
        ) as reply:
            return reply.status, await reply.json()

    async def status(self) -> Any:
        headers = {"Authorization": f"Bearer {CREDENTIAL}"}
        async with self.http.get(f"{self.url}/kitestring/v1/weights", headers=headers) as reply:
            assert reply.status == 200
            return await reply.json()

    async def complete(self, **body: Any) -> tuple[int, Any, str | None]:
        """Status, body and policy version of the header of one call."""
        asked = {"max_tokens": 2, "return_weight_versions": True, **body}
        async with self.http.post(f"{self.url}/v1/completions", json=asked) as reply:
            return reply.status, await reply.json(), reply.headers.get("X-Kitestring-Policy-Version")

    async def ready(self) -> None:
        await self.until(self._is_ready)

    async def not_ready(self) -> None:
        async def away() -> bool:
            return not await self._is_ready()

        await self.until(away)

    async def _is_ready(self) -> bool:
        return (await self.get("/ready"))[0] == 200

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """For a state that has no event of its own."""
        async with asyncio.timeout(20):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def make_pod(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Pod]]]:
    """Pods with a running engine, in which version 1.0 is published."""
    pods: list[Pod] = []
    async with aiohttp.ClientSession() as http:

        async def make(**options: bool) -> Pod:
            engine = Engine(**options)
            await engine.start()
            pod = Pod(engine, tmp_path, http)
            pod.publish("1.0")
            pods.append(pod)
            return pod

        yield make
        for pod in pods:
            await pod.engine.kill()


@pytest.fixture
async def pod(make_pod: Callable[..., Awaitable[Pod]]) -> AsyncIterator[Pod]:
    """A pod that is ready at version 1.0."""
    made = await make_pod()
    async with made.sidecar():
        await made.ready()
        yield made


@pytest.fixture
async def old_pod(make_pod: Callable[..., Awaitable[Pod]]) -> AsyncIterator[Pod]:
    """A ready pod whose server, of vLLM before 0.28, knows nothing of versions."""
    made = await make_pod(knows_versions=False, tells_versions=False)
    async with made.sidecar():
        await made.ready()
        yield made
