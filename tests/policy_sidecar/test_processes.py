"""A policy-server pod of real processes: our CPU server behind the sidecar, each of them killed in turn."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from kitestring_rollout.policy_sidecar.config import PolicySidecarConfig
from kitestring_rollout.storage import DirectoryStore
from kitestring_rollout.storage.published_weights import publish_weights, set_current
from kitestring_trainer.policy_server import PolicyServerConfig
from tests.policy_server.tiny_policy import make_policy

CREDENTIAL = "trainer-secret"


@dataclass
class Pod:
    """Its two containers, the emptyDir between them, and storage."""

    root: Path
    store: DirectoryStore
    configs: dict[str, Path]
    http: aiohttp.ClientSession
    url: str = ""
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def start(self, part: str) -> str:
        """Start a part by its command; the URL that it says it listens on."""
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("kitestring"),
            part,
            "--config",
            self.configs[part],
            stdout=asyncio.subprocess.PIPE,
        )
        self.processes[part] = process
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 100)
        return str(json.loads(line)["listening"]["http"])

    async def start_sidecar(self) -> None:
        self.url = await self.start("policy-sidecar")

    async def start_server(self) -> None:
        """As the kubelet: not before the startup probe of the sidecar has passed."""
        await self.until_answered("/startup", 200)
        await self.start("policy-server")

    async def kill(self, part: str) -> None:
        self.processes[part].kill()
        await self.processes.pop(part).wait()

    async def until_answered(self, path: str, status: int) -> None:
        async with asyncio.timeout(100):
            while True:
                async with self.http.get(self.url + path) as reply:
                    if reply.status == status:
                        return
                await asyncio.sleep(0.05)

    def publish(self, folder: Path, version: str) -> None:
        publish_weights(self.store, folder, version)
        set_current(self.store, version)

    async def push(self, version: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {CREDENTIAL}"}
        url = f"{self.url}/kitestring/v1/weights"
        async with self.http.post(url, json={"version": version}, headers=headers) as reply:
            return reply.status, await reply.json()

    async def answer(self) -> tuple[list[int], set[str]]:
        """The greedy reply's tokens, and the versions that made them."""
        asked = {
            "model": "policy",
            "prompt": "There are 48 boxes",
            "temperature": 0,
            "max_tokens": 6,
            "ignore_eos": True,
        }
        asked |= {"return_token_ids": True, "return_weight_versions": True}
        async with self.http.post(f"{self.url}/v1/completions", json=asked) as reply:
            assert reply.status == 200, await reply.text()
            (choice,) = (await reply.json())["choices"]
            return choice["token_ids"], {span["version"] for span in choice["weight_versions"]}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("policies")
    return make_policy(root / "first", seed=0), make_policy(root / "second", seed=1)


@asynccontextmanager
async def pod_of(root: Path, policy: Path) -> AsyncIterator[Pod]:
    """A pod whose parts are not started yet; version 1.0 is published."""
    weights = root / "weights"
    weights.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (root / "credential").write_text(CREDENTIAL)
    store = DirectoryStore(root / "store")
    configs = {
        "policy-server": PolicyServerConfig(model=weights / "initial", port=port, weights_root=weights),
        "policy-sidecar": PolicySidecarConfig.model_validate(
            {
                "server": f"http://127.0.0.1:{port}",
                "store": {"kind": "directory", "path": root / "store"},
                "folder": weights,
                "credential_file": root / "credential",
                "poll_seconds": 0.1,
                "takeover_seconds": 60,
            }
        ),
    }
    paths = {}
    for part, config in configs.items():
        paths[part] = root / f"{part}.json"
        paths[part].write_text(config.model_dump_json())
    async with aiohttp.ClientSession() as http:
        pod = Pod(root, store, paths, http)
        try:
            pod.publish(policy, "1.0")
            yield pod
        finally:
            for part in list(pod.processes):
                await pod.kill(part)


@pytest.mark.timeout(300)
async def test_a_pod_serves_what_is_current_whatever_dies(tmp_path: Path, policies: tuple[Path, Path]) -> None:
    first, second = policies
    async with pod_of(tmp_path, first) as pod:
        await pod.start_sidecar()
        await pod.start_server()
        await pod.until_answered("/ready", 200)
        tokens, versions = await pod.answer()
        assert versions == {"1.0"}

        # New weights, twice in a row, the second torn on its way to storage.
        pod.publish(second, "1.1")
        assert (await pod.push("1.1"))[0] == 200
        other_tokens, versions = await pod.answer()
        assert versions == {"1.1"}
        assert other_tokens != tokens
        pod.publish(first, "1.2")
        whole = pod.store.get("weights/1.2/model.safetensors")
        pod.store.put("weights/1.2/model.safetensors", whole[:-1] + bytes([whole[-1] ^ 1]))
        status, problem = await pod.push("1.2")
        assert (status, problem["reason"]) == (422, "WeightsTorn")
        assert await pod.answer() == (other_tokens, {"1.1"})
        pod.publish(first, "1.2")
        status, loaded = await pod.push("1.2")
        assert status == 200
        assert await pod.answer() == (tokens, {"1.2"})
        assert {path.name for path in (tmp_path / "weights").iterdir()} == {"1.1", "1.2", "initial"}

        # The server is killed: it starts again on `initial`, under the version of its config.
        await pod.kill("policy-server")
        await pod.until_answered("/ready", 503)
        async with pod.http.post(f"{pod.url}/v1/chat/completions", json={}) as reply:
            assert reply.status == 503
        await pod.start_server()
        await pod.until_answered("/ready", 200)
        assert await pod.answer() == (tokens, {"1.2"})
        status, again = await pod.push("1.2")
        assert status == 200
        assert again["epoch"] != loaded["epoch"]

        # The sidecar is killed, and the server lives on.
        await pod.kill("policy-sidecar")
        await pod.start_sidecar()
        await pod.until_answered("/ready", 200)
        assert await pod.push("1.2") == (200, again)
        assert await pod.answer() == (tokens, {"1.2"})


async def test_sigterm_ends_a_sidecar_at_once(tmp_path: Path, policies: tuple[Path, Path]) -> None:
    """Also one that waits for weights that never come."""
    async with pod_of(tmp_path, policies[0]) as pod:
        for published in (True, False):
            if not published:
                pod.store.delete("weights/current.json")
            await pod.start_sidecar()
            if published:
                await pod.until_answered("/startup", 200)
            sidecar = pod.processes.pop("policy-sidecar")
            sidecar.terminate()
            assert await asyncio.wait_for(sidecar.wait(), 10) == 0
