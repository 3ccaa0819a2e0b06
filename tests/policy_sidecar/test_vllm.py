"""The sidecar before the real vLLM (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from kitestring_rollout.policy_sidecar.process import running
from kitestring_rollout.policy_sidecar.server import Server
from kitestring_rollout.storage.published_weights import publish_weights, set_current
from tests.policy_sidecar.conftest import Pod
from tests.policy_sidecar.engine import Engine

pytestmark = pytest.mark.vllm


@pytest.fixture
def vllm() -> tuple[str, Path]:
    """URL of the server, and the folder with the weights v0, which it serves, and v1."""
    url = os.environ.get("KITESTRING_VLLM_URL")
    if not url:
        pytest.skip("KITESTRING_VLLM_URL is not set (make test-vllm)")
    return url, Path(os.environ["KITESTRING_VLLM_POLICIES"])


async def test_vllm_is_kept_current(tmp_path: Path, vllm: tuple[str, Path]) -> None:
    url, policies = vllm
    async with aiohttp.ClientSession() as http:
        pod = Pod(Engine(), tmp_path, http)
        publish_weights(pod.store, policies / "v0", "1.0")
        set_current(pod.store, "1.0")
        async with running(pod.config(server=url)) as (keeper, _, pod.url):
            async with asyncio.timeout(60):
                await pod.ready()
            # 0.32 tells the versions of tokens by its own generate route only: so the sidecar tells that of each reply.
            assert not keeper.tells_versions
            first = await pod.status()
            assert first["version"] == "1.0"
            assert await Server(http, url, 60).look() == first["epoch"]  # by the start time in its metrics

            # New weights wait for the call in flight, and the next call for them.
            asked = {"model": "policy", "prompt": "There are", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with http.post(f"{pod.url}/v1/completions", json=asked) as reply:
                assert (reply.status, reply.headers["X-Kitestring-Policy-Version"]) == (200, "1.0")
                await reply.content.readline()
                publish_weights(pod.store, policies / "v1", "1.1")
                set_current(pod.store, "1.1")
                pushed = asyncio.ensure_future(pod.push("1.1"))

                async def held() -> bool:
                    return keeper.gate.held

                await pod.until(held)
                after = asyncio.ensure_future(pod.complete(model="policy", prompt="There are"))
                text = (await reply.content.read()).decode()
                assert text.rstrip().endswith("data: [DONE]")
            assert await pushed == (200, {"version": "1.1", "epoch": first["epoch"]})
            status, _, version = await after
            assert (status, version) == (200, "1.1")
            assert await pod.status() == {**first, "version": "1.1", "current": "1.1"}
            publish_weights(pod.store, policies / "v0", "1.2")
            set_current(pod.store, "1.2")
            assert (await pod.push("1.2"))[0] == 200

        # Another sidecar takes it as it is.
        async with running(pod.config(server=url)) as (keeper, _, pod.url):
            async with asyncio.timeout(60):
                await pod.ready()
            assert await pod.status() == {"version": "1.2", "epoch": first["epoch"], "current": "1.2"}
