"""The scorer of docs/rewards.md, as it stands there."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitestring_api.v1alpha1.reward import Reward
from kitestring_rollout.scoring import Score, ScorerService, ScoringInput, score

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    environment = {"PATH": os.environ["PATH"], "PORT": str(port)}
    process = subprocess.Popen([sys.executable, "-c", block("python")], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_the_scorer_of_the_page_scores(url: str) -> None:
    reward = Reward.model_validate_json(json.dumps(yaml.safe_load(block("yaml"))["reward"]))
    assert reward.scorer is not None
    service = ScorerService(url, reward.scorer)
    await service.wait()

    async def of(output: Any) -> Score:
        given = ScoringInput({"question": "6*7"}, {"answer": "42"}, output, 0)
        return await score(reward, given, service=service)

    assert [await of(output) for output in ("it is 42", "it is 41", None)] == [Score(1.0), Score(0.0), Score(0.0)]
