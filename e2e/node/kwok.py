"""Fake nodes that run thousands of pods: kwok, as a process beside the cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.node import layout, programs
from e2e.node.command import Failed
from e2e.node.kube import kubeconfig, kubectl
from e2e.node.progress import say, step

SELECTOR: Final = "kwok.x-k8s.io/node=fake"
"""Annotation of the nodes that kwok plays, and a taint that keeps other pods off; their label is `type: kwok`."""
_PID_FILE: Final = layout.RUN / "kwok.pid"
_MODULE: Final = "sigs.k8s.io/kwok"


def start(nodes: int, gpus: int, *, jobs_end: bool = True) -> None:
    """Let kwok play this many nodes of so many GPUs each, `fake-0`, `fake-1`, …; returns when they are ready.

    Their pods are ready at once. Those of Jobs end well at once, unless not `jobs_end`: then they stay.
    """
    if _pid() is None:
        stages = layout.RUN / "kwok-stages.yaml"
        stages.write_text(_stages(jobs_end))
        # without leases its nodes would be lost after forty seconds
        selected = [
            "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={SELECTOR}",
            "--node-lease-duration-seconds=40",
        ]
        command = [programs.program(programs.KWOK, "kwok"), "--kubeconfig", kubeconfig(), "--config", stages, *selected]
        with (layout.LOGS / "kwok.log").open("w") as log:
            process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        _PID_FILE.write_text(str(process.pid))
        say(f"kwok runs as process {process.pid}, its log is {layout.LOGS / 'kwok.log'}")
    with step(f"{nodes} fake nodes"):
        fakes = [_node(f"fake-{number}", gpus) for number in range(nodes)]
        listed = {"apiVersion": "v1", "kind": "List", "items": fakes}
        kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(listed))
        kubectl("wait", "node", "--selector=type=kwok", "--for=condition=Ready", "--timeout=60s", timeout=90)


def stop() -> None:
    """Delete the fake nodes and end kwok."""
    if kubeconfig().exists():
        kubectl("delete", "node", "--selector=type=kwok", "--ignore-not-found")
    end()


def end() -> None:
    """End the process."""
    pid = _pid()
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while _pid() is not None:
        if time.monotonic() > deadline:
            raise Failed(f"kwok (process {pid}) does not end on SIGTERM")
        time.sleep(0.05)
    _PID_FILE.unlink(missing_ok=True)


def _stages(jobs_end: bool) -> str:
    """What happens to pods and nodes of kwok, as it brings it along."""
    folder = programs.module_folder(programs.KWOK, _MODULE) / "kustomize" / "stage" / "fast"
    stages = yaml.safe_load_all(kubectl("kustomize", folder))
    return yaml.safe_dump_all(stage for stage in stages if jobs_end or stage["metadata"]["name"] != "pod-complete")


def _node(name: str, gpus: int) -> dict[str, Any]:
    resources = {"cpu": "256", "memory": "1024Gi", "pods": "1000", "ephemeral-storage": "1024Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    key, value = SELECTOR.split("=")
    metadata = {
        "name": name,
        "annotations": {key: value, "node.alpha.kubernetes.io/ttl": "0"},
        "labels": {"type": "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "spec": {"taints": [{"key": key, "value": value, "effect": "NoSchedule"}]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def _pid() -> int | None:
    try:
        pid = int(_PID_FILE.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return pid if Path(os.fsdecode(words[0])).name == "kwok" else None
