"""Fixtures: tiny policies, and a server to talk to, ours or the real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parent))

from policy_endpoint import Endpoint, Policies  # noqa: E402
from tiny_policy import MAX_MODEL_LEN, make_policy  # noqa: E402

_RUN = """
import logging, sys
from kitestring_trainer.policy_server import PolicyServerConfig, run
logging.basicConfig(level="INFO")
run(PolicyServerConfig.model_validate_json(sys.argv[1]))
"""


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    root = tmp_path_factory.mktemp("policies")
    return Policies(root, make_policy(root / "v0", seed=0), make_policy(root / "v1", seed=1))


@pytest.fixture(scope="session")
def cpu_server(policies: Policies) -> Iterator[Endpoint]:
    """Our server as a process of its own."""
    config = {
        "model": str(policies.first),
        "tool_parser": "hermes",
        "weights_root": str(policies.root),
        "max_sequences": 16,
    }
    process = subprocess.Popen([sys.executable, "-c", _RUN, json.dumps(config)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["listening"]["http"]
        yield Endpoint("cpu", url, "policy", policies.first, policies.second, MAX_MODEL_LEN, tolerance=1e-4)
    finally:
        process.terminate()
        code = process.wait(timeout=20)
    assert code == 0


@pytest.fixture(scope="session")
def vllm_server() -> Endpoint:
    """The real vLLM, started by vllm_server.py."""
    url = os.environ.get("KITESTRING_VLLM_URL")
    if not url:
        pytest.skip("KITESTRING_VLLM_URL is not set (make test-vllm)")
    root = Path(os.environ["KITESTRING_VLLM_POLICIES"])
    return Endpoint("vllm", url, "policy", root / "v0", root / "v1", MAX_MODEL_LEN, tolerance=1e-3)


@pytest.fixture(params=["cpu", pytest.param("vllm", marks=pytest.mark.vllm)])
async def endpoint(request: pytest.FixtureRequest) -> AsyncIterator[Endpoint]:
    """Each implementation in turn."""
    found: Endpoint = request.getfixturevalue(f"{request.param}_server")
    async with aiohttp.ClientSession() as session:
        found.session = session
        yield found
        found.session = None
