"""What happens to a run and its pool from outside: suspended, resized, shared, changed, deleted, ended by the clock."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import urllib3

from e2e.harness import agents, barrier, nodes, runs
from e2e.harness.api import Object, is_true
from e2e.harness.audit import audited
from e2e.harness.images import Images
from e2e.harness.kinds import DEPLOYMENT, NETWORK_POLICY, OF_A_RUN, POD, POD_PRIORITY, POOL, RUN, SECRET
from e2e.harness.kubectl import CommandFailed, Kubectl
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from e2e.node import kube
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_operator.identity import run_id
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core

START_SECONDS = 90.0
"""Until the first agents of a run are in the midst of their rollouts."""
CHANGE_SECONDS = 60.0
"""Until what a change asks for is there: more pods, fewer, none."""
END_SECONDS = 120.0
"""Until a run whose agents no longer wait has ended."""
REFUSED = (401, 403, 410)


def test_suspended_run_goes_on_where_it_was(
    kubectl: Kubectl, images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """Suspended in mid-step a run keeps its state and holds no pod; resumed it counts every rollout once."""
    namespace.apply(stopping_pool(images), runs.collecting(steps=2))
    with barrier.barrier(namespace, images) as gate:
        cut_off = {said["rollout"]: said["attempt"] for said in gate.until("step-1", 2, seconds=START_SECONDS)}
        before = namespace.get(RUN, "run")
        held = namespace.objects_of_run("run")

        namespace.kubectl("patch", "trainingrun/run", "--type=merge", "--patch", '{"spec": {"suspend": true}}')
        runs.until_phase(namespace, "run", Phase.SUSPENDING, seconds=10)
        suspended = runs.until_phase(namespace, "run", Phase.SUSPENDED, seconds=CHANGE_SECONDS)
        assert is_true(suspended, "Suspended") and not is_true(suspended, "Finished")
        namespace.until_gone(POD, seconds=5, selector=f"{names.LABEL_RUN}=run")  # they have ended
        kept = namespace.objects_of_run("run")
        assert not {"Pod", "Deployment", "StatefulSet"} & kept.keys(), kept
        for kind in ("Secret", "ConfigMap", "Service"):
            assert kept[kind] == held[kind]
        ledger = Ledger(store, suspended)
        assert set(cut_off) < set(ledger.plan(1)), "what the step is to consist of is known"

        gate.open("step-1")
        gate.open("step-2")
        namespace.kubectl("patch", "trainingrun/run", "--type=merge", "--patch", '{"spec": {"suspend": false}}')
        run = runs.until_finished(namespace, "run", seconds=END_SECONDS)

    runs.assert_succeeded(run)
    assert run["status"]["startTime"] == before["status"]["startTime"]
    assert (run["status"]["step"], run["status"]["restarts"]) == (2, 0), "to be suspended is no restart that counts"
    assert not is_true(run, "Suspended")
    assert audited(kubectl, run, tmp_path, 2) == {names.CLASS_SUCCEEDED: 8}
    for rollout in ledger.commit(1):
        assert rollout["attempt"] != cut_off.get(rollout["rollout"]), "its agent was ended"


def test_running_run_is_resized(
    kubectl: Kubectl, images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """In mid-step the pool grows and shrinks, more agents get into a worker, steps, policy servers and gateways are
    added: nothing is lost by it."""
    rollouts = {"poolRef": {"name": "pool"}, "tasksPerStep": 4, "groupSize": 4}
    namespace.apply(stopping_pool(images, rolloutsPerWorker=2), runs.collecting(steps=2, rollouts=rollouts))
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 2, seconds=START_SECONDS)
        runs.scale(namespace, "pool", 3)
        standing = gate.until("step-1", 6, seconds=CHANGE_SECONDS)
        until_pool(namespace, replicas=3, readyReplicas=3)
        assert columns(namespace.kubectl("get", "rolloutpool", "pool"))[1:5] == ["3", "3", "3", "1"]

        more = '{"spec": {"steps": 3, "inference": {"replicas": 2}, "gateway": {"replicas": 2}}}'
        namespace.kubectl("patch", "trainingrun/run", "--type=merge", "--patch", more)
        with pytest.raises(CommandFailed) as refused:
            change = '{"spec": {"algorithm": {"advantage": "rloo"}}}'
            namespace.kubectl("patch", "trainingrun/run", "--type=merge", "--patch", change)
        assert "spec.algorithm cannot change once the run has started" in refused.value.stderr
        assert "make a new run" in refused.value.stderr

        runs.scale(namespace, "pool", 1)
        until_pool(namespace, replicas=1, readyReplicas=1)
        leaving = [pod for pod in rollout_pods(namespace, "run") if "deletionTimestamp" in pod["metadata"]]
        assert len(leaving) == 2, "workers that are too many end when their agents have ended"
        assert gate.until("step-1", 6, seconds=5) == standing

        for pod in ("run-policy-1", "run-gateway-1"):
            namespace.until_condition(POD, pod, "Ready", seconds=CHANGE_SECONDS)
        gate.open("step-1")

        few = gate.until("step-2", 2, seconds=CHANGE_SECONDS)
        namespace.kubectl("patch", "rolloutpool/pool", "--type=merge", "--patch", '{"spec": {"rolloutsPerWorker": 4}}')
        many = gate.until("step-2", 6, seconds=CHANGE_SECONDS)
        assert many[:2] == few, "another worker takes four; the one before it lets its two agents end"
        gate.open("step-2")
        gate.until("step-3", 4, seconds=CHANGE_SECONDS)
        assert namespace.get(RUN, "run")["status"]["steps"] == 3
        until_one_worker(namespace)
        for pod in ("run-policy-0", "run-policy-1"):
            with namespace.kubectl.forwarded(f"pod/{pod}", names.PORT_POLICY) as port:
                assert generated_tokens(port) > 0, f"{pod} answers calls"
        gate.open("step-3")
        run = runs.until_finished(namespace, "run", seconds=END_SECONDS)

    runs.assert_succeeded(run)
    assert run["status"]["step"] == run["status"]["steps"] == 3
    assert audited(kubectl, run, tmp_path, 3) == {names.CLASS_SUCCEEDED: 48}
    ledger = Ledger(store, run)
    assert {rollout["tries"] for step in (1, 2, 3) for rollout in ledger.commit(step)} == {1}
    for step, said in ((1, standing), (2, many)):
        assert {one["attempt"] for one in said} <= {rollout["attempt"] for rollout in ledger.commit(step)}
    assert len({rollout["epoch"] for step in (2, 3) for rollout in ledger.commit(step)}) == 2, "both gateways are used"


def test_runs_that_share_a_pool_are_apart(images: Images, namespace: Namespace, store: ObjectStore) -> None:
    """Two runs on one pool have nothing in common but the pool; one is deleted in mid-step and nothing of it stays."""
    rollouts = {"poolRef": {"name": "pool"}, "tasksPerStep": 1, "groupSize": 3}
    namespace.apply(
        stopping_pool(images), *(runs.collecting(name, steps=1, rollouts=rollouts) for name in ("one", "two"))
    )
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 4, seconds=START_SECONDS)
        status = until_pool(namespace, runs=2, replicas=2, readyReplicas=2)
        assert status["users"] == ["one", "two"]
        assert_apart(namespace)
        with pytest.raises(CommandFailed) as refused:
            change_pool(namespace)
        assert "spec.limits cannot change while runs use the pool" in refused.value.stderr
        assert "status.runs is 0" in refused.value.stderr

        two = namespace.get(RUN, "two")
        identity = run_id("two", two["metadata"]["uid"])
        assert len(processes(identity)) >= 2 or kube.external_kubeconfig() is not None
        namespace.kubectl("delete", "trainingrun/two")
        selector = f"{names.LABEL_RUN}=two"
        for kind in OF_A_RUN:
            namespace.until_gone(kind, seconds=CHANGE_SECONDS, selector=selector)
        assert processes(identity) == []
        ledger = Ledger(store, two)
        assert len(ledger.plan(1)) == 3, "what it wrote stays"
        assert ledger.keys("weights/")
        until_pool(namespace, runs=1, replicas=1)
        assert len(gate.until("step-1", 2, seconds=5)) == 2, "the other goes on"

        gate.open("step-1")
        runs.assert_succeeded(runs.until_finished(namespace, "one", seconds=END_SECONDS))
    until_pool(namespace, runs=0, replicas=0)
    change_pool(namespace)


def test_run_ends_by_the_clock(images: Images, namespace: Namespace) -> None:
    """A run's pods have its priority; its deadline ends them and it as failed, and after its time it goes by itself."""
    priority = {"apiVersion": POD_PRIORITY.api_version, "kind": POD_PRIORITY.name, "value": 7}
    namespace.api.create(priority | {"metadata": {"name": namespace.name}})
    try:
        namespace.apply(
            runs.pool(images),
            runs.collecting(
                scheduling={"priorityClassName": namespace.name},
                steps=1_000_000,
                activeDeadlineSeconds=15,
                ttlSecondsAfterFinished=5,
            ),
        )
        namespace.until(
            POD,
            lambda pods: len({pod["metadata"]["labels"][names.LABEL_COMPONENT] for pod in pods.values()}) == len(PARTS),
            f"pods of {', '.join(PARTS)}",
            seconds=START_SECONDS,
            selector=f"{names.LABEL_RUN}=run",
        )
        for pod in namespace.pods():
            assert (pod["spec"]["priorityClassName"], pod["spec"]["priority"]) == (namespace.name, 7)
        run = runs.until_finished(namespace, "run", seconds=START_SECONDS)
        status = run["status"]
        assert (status["phase"], status["reason"]) == (Phase.FAILED, names.REASON_DEADLINE_EXCEEDED)
        assert "activeDeadlineSeconds: 15" in status["message"]
        namespace.until_gone(RUN, seconds=30)
        for kind in OF_A_RUN:
            namespace.until_gone(kind, seconds=CHANGE_SECONDS, selector=f"{names.LABEL_RUN}=run")
    finally:
        namespace.api.delete(POD_PRIORITY, namespace.name)


PARTS = (
    names.COMPONENT_TRAINER,
    names.COMPONENT_POLICY_SERVER,
    names.COMPONENT_GATEWAY,
    names.COMPONENT_COLLECTOR,
    names.COMPONENT_ROLLOUT,
)


def stopping_pool(images: Images, **spec: Any) -> Object:
    """A pool of agents that stop at the barrier; the first of each group does not."""
    made = runs.pool(images, script=agents.script("stopping"), network={"egress": [barrier.EGRESS]}, **spec)
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def rollout_pods(namespace: Namespace, run: str) -> list[Object]:
    """Pods of the workers of a run."""
    return namespace.pods(f"{names.LABEL_RUN}={run},{names.LABEL_COMPONENT}={names.COMPONENT_ROLLOUT}")


def until_one_worker(namespace: Namespace) -> None:
    """Return once no other worker's pod is left."""
    selector = f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={names.COMPONENT_ROLLOUT}"
    namespace.until(POD, lambda pods: len(pods) == 1, "the only worker", seconds=CHANGE_SECONDS, selector=selector)


def until_pool(namespace: Namespace, **figures: int) -> dict[str, Any]:
    """The status of the pool, once it has these figures."""
    pool = namespace.until_object(
        POOL,
        "pool",
        lambda pool: figures.items() <= pool.get("status", {}).items(),
        f"pool with {figures}",
        seconds=CHANGE_SECONDS,
    )
    return dict(pool["status"])


def change_pool(namespace: Namespace) -> None:
    """Change what cannot change while runs use the pool."""
    namespace.kubectl("patch", "rolloutpool/pool", "--type=merge", "--patch", '{"spec": {"limits": {"seconds": 30}}}')


def columns(table: str) -> list[str]:
    """The only row of what `kubectl get` prints."""
    _, row = table.splitlines()
    return row.split()


def generated_tokens(port: int) -> float:
    """Tokens that the policy server behind a port has generated."""
    text = urllib3.request("GET", f"http://127.0.0.1:{port}{names.ROUTE_METRICS}", timeout=10).data.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


def assert_apart(namespace: Namespace) -> None:
    """Each run has workers, policies and keys of its own; those of one open nothing of the other."""
    deployments = {item["metadata"]["labels"][names.LABEL_RUN] for item in namespace.listed(DEPLOYMENT)}
    policies = [item["metadata"]["labels"][names.LABEL_RUN] for item in namespace.listed(NETWORK_POLICY)]
    assert deployments == {"one", "two"}
    assert policies.count("one") == policies.count("two") > 1
    one, two = (namespace.get(SECRET, f"{name}-keys")["data"] for name in ("one", "two"))
    assert one.keys() == two.keys() and not set(one.values()) & set(two.values())

    (pod,) = rollout_pods(namespace, "one")
    token = namespace.exec(pod["metadata"]["name"], "agent", "python3", "-c", FIND_TOKEN).split()[0]
    assert asked(namespace, "pod/one-gateway-0", names.PORT_AGENTS, names.ROUTE_MODELS, token) == 200
    assert asked(namespace, "pod/two-gateway-0", names.PORT_AGENTS, names.ROUTE_MODELS, token) in REFUSED
    credential = b64decode(one["queueCredential"]).decode()
    assert asked(namespace, "svc/one-trainer", names.PORT_QUEUE, names.ROUTE_RUN_STATUS, credential) == 200
    assert asked(namespace, "svc/two-trainer", names.PORT_QUEUE, names.ROUTE_RUN_STATUS, credential) in REFUSED
    other = f"two-gateway-0.two-gateway.{namespace.name}.svc"
    reached = namespace.exec(pod["metadata"]["name"], "agent", "python3", "-c", REACH, other, str(names.PORT_AGENTS))
    assert reached == "no\n", "an agent does not even reach the gateway of another run"


FIND_TOKEN = f"""
import glob
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        entries = open(path, "rb").read().decode().split(chr(0))
    except OSError:
        continue
    for entry in entries:
        if entry.startswith("{names.ENV_OPENAI_API_KEY}="):
            print(entry.partition("=")[2])
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)
    print("yes")
except OSError:
    print("no")
"""


def asked(namespace: Namespace, target: str, port: int, route: str, bearer: str) -> int:
    """HTTP status of a GET with a bearer token."""
    with namespace.kubectl.forwarded(target, port) as local:
        headers = {"Authorization": f"Bearer {bearer}"}
        return int(urllib3.request("GET", f"http://127.0.0.1:{local}{route}", headers=headers, timeout=10).status)


def processes(run: str) -> list[str]:
    """Processes on the machines of the cluster that have the identity of a run in their environment."""
    if kube.external_kubeconfig() is not None:
        return []
    found: list[str] = []
    for node in json.loads(kube.kubectl("get", "nodes", "--output", "json"))["items"]:
        command = f"grep -lsz {names.ENV_RUN}={run} /proc/[0-9]*/environ || true"
        found += nodes.on(node["metadata"]["name"], "sh", "-c", command).split()
    return found
