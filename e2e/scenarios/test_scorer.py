"""A scorer of the pool's own: pods that get hidden fields, score by them, and stand between walls of their own."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import agents, barrier, runs
from e2e.harness.api import Object, condition, is_true
from e2e.harness.audit import audited
from e2e.harness.images import Images
from e2e.harness.kinds import CONFIG_MAP, DEPLOYMENT, POD
from e2e.harness.kubectl import Kubectl
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core

JUDGE = agents.FOLDER / "judge.py"
PORT = 9000
START_SECONDS = 120.0
END_SECONDS = 180.0
SECRET = f"hidden-{secrets.token_hex(8)}"
NO_WALL = {"open", "gaierror"}
"""How a connection ends that no wall stopped, or that was never tried, for want of an address."""

CONNECTS = """
import concurrent.futures, json, socket, sys
def connects(target):
    try:
        socket.create_connection(tuple(target[1:]), timeout=2).close()
    except OSError as error:
        return target[0], type(error).__name__
    return target[0], "open"
with concurrent.futures.ThreadPoolExecutor(16) as threads:
    print(json.dumps(dict(threads.map(connects, json.loads(sys.argv[1])))))
"""
"""Says of each (what, host, port) how a connection there ends."""
FINDS = """
import pathlib, sys
word, found = sys.argv[1][::-1].encode(), []
files = [*pathlib.Path("/proc").glob("[0-9]*/environ"), *pathlib.Path("/proc").glob("[0-9]*/cmdline")]
for folder in ("/kitestring", "/tmp", "/etc", "/run", "/var"):
    files += pathlib.Path(folder).rglob("*")
for file in files:
    try:
        if file.is_file() and word in file.read_bytes():
            found.append(str(file))
    except OSError:
        pass
print(len(files), found)
"""
"""Looks for a word, given backwards, wherever this user may read."""


def test_hidden_fields_go_to_the_scorer_alone(  # noqa: PLR0917 - fixtures
    kubectl: Kubectl, images: Images, namespace: Namespace, release: Release, store: ObjectStore, tmp_path: Path
) -> None:
    """Rewards are its; agents neither reach it nor see what it sees; it reaches nothing; killed, it is asked again."""
    rows = [("plain", 4.0), ("stop at the barrier", 0.25)]
    tasks = [{"question": question, "worth": worth, "secret": SECRET} for question, worth in rows]
    scorer = {
        "image": images.python,
        "command": ["python3", "-c", JUDGE.read_text()],
        "port": PORT,
        "template": {"spec": {"terminationGracePeriodSeconds": 1}},
    }
    pool = runs.pool(
        images,
        script=agents.script("told"),
        reward={"source": "scorer", "scorer": scorer},
        network={"egress": [barrier.EGRESS]},
    )
    pool["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    run = runs.collecting(
        steps=1,
        tasks={"train": {"inline": tasks}, "hiddenFields": ["worth", "secret"]},
        rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": len(tasks), "groupSize": 2},
    )
    with barrier.barrier(namespace, images) as gate:
        namespace.apply(pool, run)
        gate.until("step-1", 2, seconds=START_SECONDS)
        working = runs.until_status(
            namespace, "run", lambda status: status.get("rolloutsRunning") == 2, "two agents", seconds=60
        )
        assert is_true(working, "RolloutsReady"), condition(working, "RolloutsReady")
        worker, judge = pod_of(namespace, names.COMPONENT_ROLLOUT), pod_of(namespace, names.COMPONENT_SCORER)
        assert_walls(namespace, release, worker, judge)
        assert_hidden(namespace, worker)
        namespace.delete(POD, judge["metadata"]["name"], grace=0)
        gate.open("step-1")
        ended = runs.until_finished(namespace, "run", seconds=END_SECONDS)
    runs.assert_succeeded(ended)
    worth = [worth for _, worth in rows]
    rollouts = Ledger(store, ended).commit(1)
    assert [rollout["reward"] for rollout in rollouts] == [worth[rollout["task"]] for rollout in rollouts], rollouts
    assert {rollout["reward_source"] for rollout in rollouts} == {"scorer"}
    assert {rollout["tries"] for rollout in rollouts} == {1}, "a scorer that was away costs no attempt"
    assert audited(kubectl, ended, tmp_path, 1) == {names.CLASS_SUCCEEDED: 4}
    for kind in (DEPLOYMENT, POD):
        namespace.until_gone(kind, seconds=60, selector=selector(names.COMPONENT_SCORER))


def assert_walls(namespace: Namespace, release: Release, worker: Object, judge: Object) -> None:
    """Only the trainer reaches the scorer, and the scorer reaches nothing of the run, the cluster or the world."""
    to_scorer = [("its name", "run-scorer", PORT), ("its address", judge["status"]["podIP"], PORT)]
    for what, pod, container in (
        ("agent", worker["metadata"]["name"], "agent"),
        ("pod of no run", barrier.NAME, barrier.NAME),
    ):
        ends = connections(namespace, pod, container, to_scorer)
        assert not NO_WALL & set(ends.values()), f"{what} → scorer: {ends}"
    targets = [
        ("gateway", "run-gateway-0.run-gateway", names.PORT_AGENTS),
        ("gateway's admin side", "run-gateway-0.run-gateway", names.PORT_GATEWAY_ADMIN),
        ("queue", "run-trainer", names.PORT_QUEUE),
        ("policy server", "run-policy-0.run-policy", names.PORT_POLICY),
        ("collector", "run-collector", names.PORT_COLLECTOR),
        ("storage", f"{release.namespace}-seaweedfs.{release.namespace}.svc", 8333),
        ("API server", "kubernetes.default.svc", 443),
        ("agent", worker["status"]["podIP"], names.PORT_WORKER),
        ("other pod", barrier.NAME, barrier.PORT),
        ("cloud's metadata", "169.254.169.254", 80),
    ]
    name = judge["metadata"]["name"]
    ends = connections(namespace, name, "scorer", targets)
    assert not NO_WALL & set(ends.values()), f"scorer → {ends}"
    assert connections(namespace, name, "scorer", [("itself", "127.0.0.1", PORT)]) == {"itself": "open"}
    spec = judge["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def assert_hidden(namespace: Namespace, worker: Object) -> None:
    """Neither in the agent's pod, nor in what it is made from."""
    said = namespace.exec(
        worker["metadata"]["name"], "agent", "python3", "-c", FINDS, SECRET[::-1], seconds=60
    ).partition(" ")
    assert int(said[0]) > 10, "it looked"
    assert said[2].strip() == "[]"
    assert SECRET not in json.dumps(worker)
    config = namespace.get(CONFIG_MAP, "run-config")["data"]
    assert SECRET in config["trainer.json"]
    assert not [file for file, text in config.items() if SECRET in text and file != "trainer.json"]
    mounted = [
        item["key"] for one in worker["spec"]["volumes"] if "configMap" in one for item in one["configMap"]["items"]
    ]
    assert mounted == ["worker.json"]


def connections(namespace: Namespace, pod: str, container: str, targets: list[tuple[str, str, int]]) -> dict[str, Any]:
    """How connections from a container end."""
    said = namespace.exec(pod, container, "python3", "-c", CONNECTS, json.dumps(targets), seconds=60)
    return dict(json.loads(said))


def pod_of(namespace: Namespace, component: str) -> Object:
    """The one pod of a part of the run."""
    (pod,) = namespace.pods(selector(component))
    return pod


def selector(component: str) -> str:
    return f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={component}"
