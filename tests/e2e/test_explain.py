"""What a failed scenario prints: here of a run whose agent's image cannot be pulled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.harness.api import Api
from e2e.harness.explain import explain
from e2e.harness.kinds import EVENT, NODE, POD, RUN, SERVICE, WORKLOAD
from tests.e2e.cluster_api import ClusterApi, served

ROOT = Path(__file__).parents[2]
SPACE = "e2e-absent-1f2e"
IMAGE = "registry.example.com/absent:1"
BACK_OFF = f'Back-off pulling image "{IMAGE}"'
LINES = [f"worker line {number}" for number in range(40)]


@pytest.fixture
def cluster() -> ClusterApi:
    cluster = ClusterApi(WORKLOAD)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
    lost = ready | {
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": "Kubelet stopped posting node status.",
    }
    cluster.put(NODE, "node-well", spec={}, status={"conditions": [ready]})
    cluster.put(NODE, "node-lost", spec={}, status={"conditions": [lost]})
    degraded = {"type": "Degraded", "status": "True", "reason": "ImagePull", "message": f"pod run-a: {IMAGE}"}
    cluster.put(RUN, "run", SPACE, status={"phase": "Running", "step": 0, "conditions": [degraded]})
    cluster.put(SERVICE, "run-trainer", SPACE, status={"loadBalancer": {}})
    waiting = {"reason": "ImagePullBackOff", "message": BACK_OFF}
    began_again = {"name": "worker", "ready": True, "restartCount": 1, "state": {"running": {}}}
    ended = {"reason": "Error", "exitCode": 1, "message": "KeyError: 'lease'"}
    unready = {"type": "ContainersReady", "status": "False", "reason": "ContainersNotReady", "message": "[agent]"}
    cluster.put(
        POD,
        "run-a",
        SPACE,
        spec={"nodeName": "node-well"},
        status={
            "phase": "Pending",
            "conditions": [unready],
            "initContainerStatuses": [began_again | {"lastState": {"terminated": ended}}],
            "containerStatuses": [{"name": "agent", "ready": False, "restartCount": 0, "state": {"waiting": waiting}}],
        },
    )
    about = {"kind": "Pod", "name": "run-a"}
    event = {"involvedObject": about, "type": "Warning", "reason": "Failed", "count": 3, "message": f"{BACK_OFF}: gone"}
    cluster.put(EVENT, "run-a.2", SPACE, lastTimestamp="2026-01-01T00:00:09Z", **event)
    earlier = event | {"type": "Normal", "reason": "Scheduled", "count": 1, "message": "Assigned to node-well"}
    cluster.put(EVENT, "run-a.1", SPACE, lastTimestamp="2026-01-01T00:00:01Z", **earlier)
    cluster.log("run-a", "worker", "\n".join(LINES) + "\n")
    cluster.log("run-a", "worker", "Traceback\nKeyError: 'lease'\n", previous=True)
    return cluster


@pytest.fixture
def kubeconfig(cluster: ClusterApi, tmp_path: Path) -> Iterator[Path]:
    with served(cluster, tmp_path) as kubeconfig:
        yield kubeconfig


@pytest.fixture
def text(kubeconfig: Path, tmp_path: Path) -> str:
    return explain(Api(kubeconfig), [SPACE, "empty"], tmp_path / "said")


def test_objects_say_what_they_wait_for(text: str) -> None:
    run, condition = text[text.index("TrainingRun run:") :].splitlines()[:2]
    assert "'phase': 'Running'" in run and "conditions" not in run
    assert condition.strip() == f"Degraded=True ImagePull pod run-a: {IMAGE}"
    pod, lacking, worker, agent = text[text.index("Pod run-a:") :].splitlines()[:4]
    assert pod == "Pod run-a: Pending node-well"
    assert lacking.strip() == "ContainersReady=False ContainersNotReady [agent]"
    assert worker.strip() == "worker: running  (ready, 1 restarts; before: Error 1 KeyError: 'lease')"
    assert agent.strip() == f"agent: waiting ImagePullBackOff {BACK_OFF} (not ready, 0 restarts)"


def test_events_come_in_order(text: str) -> None:
    events = text[text.index(f"----- events of {SPACE}") :].splitlines()[1:3]
    assert events == [
        "2026-01-01T00:00:01Z Normal Pod/run-a Scheduled: Assigned to node-well",
        f"2026-01-01T00:00:09Z Warning Pod/run-a Failed ×3: {BACK_OFF}: gone",
    ]


def test_logs_are_short_on_the_screen_and_whole_in_the_folder(text: str, tmp_path: Path) -> None:
    lines = text.splitlines()
    begin = lines.index("----- log of run-a-worker, last lines of 40")
    assert lines[begin + 1 : begin + 26] == LINES[15:]
    assert LINES[14] not in lines
    assert "KeyError: 'lease'" in lines, "of the container before"
    assert (tmp_path / "said" / "run-a-worker.log").read_text().splitlines() == LINES
    assert (tmp_path / "said" / "run-a-worker-previous.log").read_text() == "Traceback\nKeyError: 'lease'\n"


def test_a_container_without_a_log_says_why(text: str) -> None:
    assert 'no log: container "agent" in pod "run-a" is waiting to start' in text


def test_only_what_is_there_and_matters(text: str) -> None:
    assert "node node-lost: NodeStatusUnknown: Kubelet stopped" in text
    assert "node node-well:" not in text
    assert "Workload" not in text, "the cluster knows no such kind"
    assert text[text.index("===== namespace empty") :].splitlines()[1].startswith("===== everything")


def test_the_folder_has_all_of_it(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "said"
    assert text.endswith(f"===== everything, with whole logs: {folder}")
    assert (folder / "explanation.txt").read_text() == text
    (run,) = yaml.safe_load_all((folder / f"{SPACE}-trainingruns.yaml").read_text())
    assert run["metadata"] == {"name": "run", "namespace": SPACE}, "whole, but for the managed fields"


SCENARIOS = """
from pathlib import Path
import pytest
import e2e.conftest
from e2e.harness.api import Api
from e2e.harness.kubectl import Kubectl
from e2e.harness.namespace import Namespace

e2e.conftest.ARTIFACTS = Path("artifacts").resolve()

@pytest.fixture
def api():
    return Api(Path({kubeconfig!r}))

@pytest.fixture
def namespace(api):
    return Namespace(api, {space!r}, Kubectl(Path("kubectl"), api.kubeconfig))

def test_waits_in_vain(namespace):
    raise AssertionError("the end did not come")

def test_is_well(namespace):
    pass
"""


def test_a_failed_scenario_has_it_in_its_report_and_no_other(kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "test_scenarios.py").write_text(SCENARIOS.format(kubeconfig=str(kubeconfig), space=SPACE))
    command = [sys.executable, "-m", "pytest", "-p", "e2e.conftest", "-p", "no:cacheprovider", "test_scenarios.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    failed = done.stdout[done.stdout.index("test_waits_in_vain") :]
    for part in (
        "the end did not come",
        f"agent: waiting ImagePullBackOff {BACK_OFF}",
        "Failed ×3",
        "no log:",
        LINES[39],
    ):
        assert part in failed
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["test_waits_in_vain"]
