"""Object storage away for 20 s: it delays the run, and loses nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from local_run import LocalRun, audit, wait_until
from test_processes import gated

from kitestring_rollout.storage import open_store
from tests.storage.seaweed import Seaweed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

AWAY_SECONDS = 20.0


def test_storage_away_for_twenty_seconds(start_run: Callable[..., LocalRun], tmp_path: Path, seaweed: Seaweed) -> None:
    tasks, release, waiting = gated(tmp_path)
    config = seaweed.config
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "storage"},
        "stringData": {
            "accessKeyId": config.access_key_file.read_text().strip(),
            "secretAccessKey": config.secret_key_file.read_text().strip(),
        },
    }
    storage = {
        "bucket": config.bucket,
        "endpoint": f"http://{config.endpoint}",
        "credentialsSecretRef": {"name": "storage"},
    }
    run = start_run(tasks, group_size=2, run={"storage": storage}, documents=[secret])
    wait_until(lambda: len(waiting()) == 4, "four agents in mid-rollout")
    seaweed.process.send_signal(signal.SIGSTOP)
    release.touch()
    time.sleep(AWAY_SECONDS)  # the fault itself
    seaweed.process.send_signal(signal.SIGCONT)
    result = run.wait()
    assert result["phase"] == "Succeeded", result
    store = open_store(config.model_copy(update={"prefix": run.folder.name}))
    assert audit(store, 1) == {"Succeeded": 4}
    commit = json.loads(store.get("state/commits/t000001.json"))
    assert [rollout["tries"] for rollout in commit["rollouts"]] == [1] * 4, "it only delays: nothing is tried again"
