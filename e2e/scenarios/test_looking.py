"""Looking at a run of the cluster from another machine, by the commands of docs/looking-at-runs.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from e2e.harness import release, runs, storage
from e2e.harness.images import Images
from e2e.harness.kubectl import Kubectl, call
from e2e.harness.namespace import Namespace
from e2e.node import layout
from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.storage.manifest import fetch_folder

pytestmark = pytest.mark.full

PAGE: Final = layout.REPOSITORY / "docs" / "looking-at-runs.md"
RUN: Final = "calculator"
"""As on the page."""
ADDRESS: Final = "127.0.0.1:8333"
SERVICE: Final = "kitestring-seaweedfs.kitestring.svc"
FINISHED_SECONDS = 300.0


def test_a_run_of_the_cluster_is_read_elsewhere(
    kubectl: Kubectl, images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """What trained on the cluster is inspected and shown from a folder made by hand, and its model is fetched."""
    namespace.apply(runs.pool(images), runs.collecting(RUN, steps=1, trainer={"backend": "verl", "device": "cpu"}))
    run = runs.until_finished(namespace, RUN, seconds=FINISHED_SECONDS)
    runs.assert_succeeded(run)
    _, _, checkpoint = run["status"]["checkpoint"].split("/", 3)[1:]
    fetch_folder(store, checkpoint, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()

    with kubectl.in_namespace(release.NAME).forwarded(f"svc/{release.NAME}-seaweedfs", storage.PORT) as port:
        _follow(namespace.kubectl, tmp_path, f"127.0.0.1:{port}")
        figures = checkpoint.partition("checkpoints/")[0] + "state/metrics.jsonl"
        folder = tmp_path / "runs" / RUN
        (folder / "metrics.jsonl").write_bytes(store.get(figures))

        said = json.loads(_kitestring(tmp_path, "inspect", str(folder), "--output", "json"))
        assert (said["phase"], said["steps"], said["rollouts"]) == ("Succeeded", 1, {"Succeeded": 4})
        assert said["checkpoint"] == run["status"]["checkpoint"] and said["prompt_tokens"] > 0
        assert said["best"] in _kitestring(tmp_path, "show", str(folder), said["best"])
        exported = _kitestring(tmp_path, "export", str(folder)).splitlines()
        assert {json.loads(line)["step"] for line in exported} == {1}


def _follow(kubectl: Kubectl, folder: Path, address: str) -> None:
    """Carry out in a folder what of the page makes the run's folder, with this installation's names."""
    text = PAGE.read_text(encoding="utf-8").replace(SERVICE, f"{release.NAME}-seaweedfs.{release.NAME}.svc")
    lines = re.findall(r"^\$ (.+)$", text.partition("## Runs of a cluster")[2], re.MULTILINE)
    chosen = [line for line in lines if re.match(r"key\b|mkdir |kubectl get .*> runs/", line)]
    assert len(chosen) == 5, lines
    called = " ".join(map(shlex.quote, kubectl.command()))
    script = [f'kubectl() {{ {called} "$@"; }}', *(line.replace(ADDRESS, address) for line in chosen)]
    call(["bash", "-euo", "pipefail", "-c", "\n".join(script)], cwd=folder)


def _kitestring(folder: Path, *arguments: str) -> str:
    return call([str(layout.VENV / "bin" / "kitestring"), *arguments], cwd=folder)
