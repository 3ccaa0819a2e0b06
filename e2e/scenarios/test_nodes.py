"""What befalls a run from below and above: nodes, storage, deletion; and steps that all fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import agents, barrier, nodes, runs
from e2e.harness.api import Api, Object, condition, is_true
from e2e.harness.audit import audited
from e2e.harness.barrier import Barrier
from e2e.harness.images import Images
from e2e.harness.kinds import JOB, NODE, POD, RUN, SECRET
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_rollout.storage import ObjectStore
from kitestring_trainer.ledger import COMMITS, PLANS

pytestmark = pytest.mark.full

START_SECONDS = 120.0
SLOTS = 4
ROLLOUTS = 8
"""Of a step."""
SILENT_SECONDS = 60.0
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
ASIDE = {"nodeSelector": {CONTROL_PLANE: ""}, "tolerations": [{"key": CONTROL_PLANE, "operator": "Exists"}]}
"""Where a barrier stands that no fault of a worker's node touches."""


def test_drained_node_costs_no_rollout(
    images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """`kubectl drain` of the node with gateway, policy server and worker: what runs ends there, the rest elsewhere."""
    nodes.require()
    stay, go = workers(namespace.api)
    namespace.apply(
        stopping_pool(images, near(go)),
        stopping_run(
            2,
            trainer=near(stay),
            collector=near(stay),
            gateway=near(go),
            inference=near(go),
        ),
    )
    with barrier.barrier(namespace, images, **ASIDE) as gate:
        before = in_midst(gate, 1)
        drain = ["drain", go, "--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={names.LABEL_RUN}=run"]
        try:
            with ThreadPoolExecutor(1) as thread:
                drained = thread.submit(namespace.kubectl, *drain, "--timeout=120s", seconds=150)
                namespace.until(
                    POD,
                    lambda pods: any("deletionTimestamp" in pod["metadata"] for pod in pods.values()),
                    "the worker's notice to go",
                    seconds=30,
                    selector=f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={names.COMPONENT_ROLLOUT}",
                )
                gate.open("step-1")
                drained.result()
            in_midst(gate, 2)
            assert {pod["spec"]["nodeName"] for pod in namespace.pods(f"{names.LABEL_RUN}=run")} == {stay}
            gate.open("step-2")
            run = runs.until_finished(namespace, "run", seconds=120)
        finally:
            namespace.kubectl("uncordon", go)
    runs.assert_succeeded(run)
    assert audited(namespace.kubectl, run, tmp_path, 2) == {names.CLASS_SUCCEEDED: 2 * ROLLOUTS}
    assert run["status"]["restarts"] == 0
    ended = {rollout["rollout"]: rollout for rollout in Ledger(store, run).commit(1)}
    assert {ended[name]["attempt"] for name in before} == set(before.values()), "what ran was let end"


def test_silent_kubelet_costs_no_rollout(images: Images, namespace: Namespace, tmp_path: Path) -> None:
    """A node says nothing for a minute and counts as lost; its pods live on, and the run goes on when it is back."""
    nodes.require()
    _, silent = workers(namespace.api)
    near_it = near(silent)
    namespace.apply(
        stopping_pool(images, near_it),
        stopping_run(3, trainer=near_it, collector=near_it, gateway=near_it, inference=near_it),
    )
    with barrier.barrier(namespace, images, **ASIDE) as gate:
        in_midst(gate, 1)
        before, begun = pods_of_run(namespace), time.monotonic()
        with kubelet_stopped(namespace.api, silent):
            until_node(namespace.api, silent, "Unknown", seconds=120)
            gate.open("step-1")
            gate.open("step-2")
            time.sleep(max(0.0, SILENT_SECONDS - (time.monotonic() - begun)))  # the length of the fault
        until_node(namespace.api, silent, "True", seconds=60)
        in_midst(gate, 3)
        assert pods_of_run(namespace) == before, "no pod was made anew"
        gate.open("step-3")
        run = runs.until_finished(namespace, "run", seconds=180)
    runs.assert_succeeded(run)
    assert audited(namespace.kubectl, run, tmp_path, 3) == {names.CLASS_SUCCEEDED: 3 * ROLLOUTS}
    assert run["status"]["restarts"] == 0, "a trainer that lives is not replaced"


def test_storage_that_restarts_costs_no_rollout(
    images: Images, release: Release, namespace: Namespace, tmp_path: Path
) -> None:
    """Object storage dies in mid-step and in the midst of its writes, and comes back with what it had acknowledged."""
    nodes.require()
    namespace.apply(stopping_pool(images), stopping_run(3))
    storage = f"{release.namespace}-seaweedfs-0"
    with barrier.barrier(namespace, images) as gate:
        for step in (1, 2, 3):
            in_midst(gate, step)
            pod = release.api.get(POD, storage, release.namespace)
            assert pod is not None
            restarts = nodes.status_of(pod, "seaweedfs")["restartCount"]
            nodes.crash(pod, "seaweedfs")
            gate.open(f"step-{step}")

            def is_back(pod: Object, restarts: int = restarts) -> bool:
                return is_true(pod, "Ready") and nodes.status_of(pod, "seaweedfs")["restartCount"] > restarts

            release.api.until_object(POD, storage, release.namespace, is_back, "the storage's return", seconds=120)
        run = runs.until_finished(namespace, "run", seconds=180)
    runs.assert_succeeded(run)
    assert audited(namespace.kubectl, run, tmp_path, 3) == {names.CLASS_SUCCEEDED: 3 * ROLLOUTS}
    assert run["status"]["restarts"] == 0


def test_steps_in_which_all_fail(images: Images, namespace: Namespace, store: ObjectStore) -> None:
    """A step without any group to learn from is skipped and said; so many in a row end the run with the cause."""
    pool = runs.pool(
        images,
        script=agents.script("behaving"),
        network={"egress": [barrier.EGRESS]},
        agentProtocol={"task": {"from": "argument"}},
        reward={"source": "builtin", "builtin": {"kind": "regex", "pattern": "^$"}},
    )
    pool["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    run = runs.collecting(
        steps=9,
        policies=[JUDGE],
        tasks={"train": {"inline": [{"by": "step", "do": ["fail", "stop", "fail", "fail", "fail"], "text": ""}]}},
        rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": 1, "groupSize": 2},
        failurePolicy={"maxSkippedSteps": 3},
    )
    namespace.apply(pool, run)
    with barrier.barrier(namespace, images) as gate:
        gate.until("stop", 2, seconds=START_SECONDS)
        degraded = runs.until_status(
            namespace, "run", lambda status: status.get("skippedSteps") == 1, "the skipped step", seconds=30
        )
        assert condition(degraded, "Degraded")["reason"] == names.REASON_STEPS_SKIPPED
        assert is_true(degraded, "Degraded")
        gate.open("stop")
        run = runs.until_finished(namespace, "run", seconds=60)
    status = run["status"]
    assert (status["phase"], status["reason"]) == (Phase.FAILED, names.REASON_STEPS_SKIPPED), status
    assert "I give up" in status["message"], "the cause"
    assert (status["skippedSteps"], status["rolloutsSucceeded"], status["rolloutsFailed"]) == (4, 2, 8)
    ledger = Ledger(store, run)
    for step in (1, 2, 3, 4, 5):
        expected = names.CLASS_SUCCEEDED if step == 2 else names.CLASS_AGENT_FAILED
        assert [rollout["class"] for rollout in ledger.commit(step)] == [expected] * 2


def test_deleted_jobs_and_runs(images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path) -> None:
    """A rollout whose Job is deleted by hand is tried again; a deleted run leaves nothing, not even to a namesake."""
    pool = stopping_pool(images, isolation="Job", replicas=SLOTS)
    pool["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    namespace.apply(pool, stopping_run(1))
    with barrier.barrier(namespace, images) as gate:
        first = in_midst(gate, 1)
        gone = namespace.get(RUN, "run")
        namespace.delete(RUN, "run")
        for kind in (POD, JOB, SECRET):
            # a gateway waits for those who would end its attempts, as long as its pod may
            namespace.until_gone(kind, seconds=75, selector=f"{names.LABEL_RUN}=run")
        namespace.apply(stopping_run(1))
        second = {said["rollout"]: said["attempt"] for said in gate.until("step-1", SLOTS, seconds=START_SECONDS)}
        assert second.keys() == first.keys() and not set(second.values()) & set(first.values()), "another run"
        deleted = min(second)
        (job,) = namespace.listed(JOB, f"{names.LABEL_ROLLOUT}={deleted}")
        (pod,) = namespace.pods(f"{names.LABEL_ROLLOUT}={deleted}")
        namespace.delete(JOB, job["metadata"]["name"])
        # the pod outlives its Job for moments in which an agent that goes on would end well
        namespace.until_gone(POD, seconds=60, name=pod["metadata"]["name"])
        gate.open("step-1")
        run = runs.until_finished(namespace, "run", seconds=120)
    runs.assert_succeeded(run)
    assert run["metadata"]["uid"] != gone["metadata"]["uid"]
    assert audited(namespace.kubectl, run, tmp_path, 1) == {names.CLASS_SUCCEEDED: ROLLOUTS}
    tries = {rollout["rollout"]: rollout["tries"] for rollout in Ledger(store, run).commit(1)}
    assert tries.pop(deleted) == 2 and set(tries.values()) == {1}, "one is made again, once; whose Job is over is not"
    namespace.until_gone(JOB, seconds=30, selector=names.LABEL_ROLLOUT)


@pytest.mark.timeout(1200, func_only=True)
def test_trainer_killed_in_mid_step_and_between_steps(
    images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """The trainer dies while rollouts run, as it begins an update, and between two steps: no rollout and no update is
    lost, and none is made twice."""
    nodes.require()
    run = stopping_run(3)
    run["spec"]["tasks"]["validation"] = {"path": "./tasks/validation.jsonl", "limit": 1}
    run["spec"] |= {
        "trainer": {"backend": "verl", "device": "cpu"},
        "algorithm": {"maxRowTokens": {"prompt": 128, "response": 256}, "updatesPerStep": ROLLOUTS},
        # what is validated after step 2 stops at the barrier as well: neither that step goes on nor the next begins
        "validation": {"before": False, "every": 2, "after": False, "greedy": False, "sampledRepeats": 2},
        "checkpoints": {"every": 3, "keep": 1},
    }
    namespace.apply(stopping_pool(images), run)
    with barrier.barrier(namespace, images) as gate:
        gate.open("step-1")
        gate.until("step-2", SLOTS, seconds=TRAINER_SECONDS)
        crash_trainer(namespace, restarts=1)
        gate.open("step-2")
        ledger = Ledger(store, namespace.get(RUN, "run"))
        until_written(ledger, f"{COMMITS}t000002.json")
        before = ledger.commit(2)
        crash_trainer(namespace, restarts=2)
        gate.until(BETWEEN, 1, seconds=TRAINER_SECONDS)
        until_written(ledger, "checkpoints/state/step-000002/manifest.json")
        crash_trainer(namespace, restarts=3)
        assert f"{PLANS}t000003.json" not in ledger.keys(PLANS), "it died between two steps"
        gate.open(BETWEEN)
        gate.open("step-3")
        done = runs.until_finished(namespace, "run", seconds=TRAINER_SECONDS)
    runs.assert_succeeded(done)
    assert audited(namespace.kubectl, done, tmp_path, 3) == {names.CLASS_SUCCEEDED: 3 * ROLLOUTS}
    assert (done["status"]["step"], done["status"]["restarts"]) == (3, 3)
    assert ledger.commit(2) == before, "what was committed is what was trained"
    tries = {rollout["rollout"]: rollout["tries"] for step in (1, 2, 3) for rollout in ledger.commit(step)}
    assert all(count == 1 for name, count in tries.items() if name.endswith("-000")), "who was done is not run again"
    assert {tries[rollout["rollout"]] for rollout in ledger.commit(3)} == {1}, "nothing befell the last step"
    first, *_, last = ledger.resumed_steps()
    assert (first, last, len(ledger.resumed_steps())) == (0, 2, 4), "the update of step 2 is not made once more"
    assert "checkpoints/step-000003/manifest.json" in ledger.keys("checkpoints/step-000003/")


BETWEEN = f"{names.MODE_VALIDATION_SAMPLED}-2"
"""Where the agents of the validation after step 2 stand."""


def until_written(ledger: Ledger, key: str) -> None:
    """Return at the moment at which an object of the run is in storage."""
    deadline = time.monotonic() + TRAINER_SECONDS
    while key not in ledger.keys(key):
        assert time.monotonic() < deadline, f"no {key}"
        time.sleep(0.02)  # object storage tells nobody of its objects


def crash_trainer(namespace: Namespace, *, restarts: int) -> None:
    """Kill the trainer's process, and wait until the run has noticed."""
    selector = f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={names.COMPONENT_TRAINER}"
    (pod,) = (pod for pod in namespace.pods(selector) if pod["status"]["phase"] == "Running")
    nodes.crash(pod, "trainer")
    runs.until_status(
        namespace, "run", lambda status: status.get("restarts") == restarts, f"restart {restarts}", seconds=60
    )


TRAINER_SECONDS = 300.0
"""Until a trainer that learns is there and has made what is asked for."""

# --- What they share ---

JUDGE = {"name": "judge", "train": False, "endpoint": {"url": "http://judge.invalid/v1", "model": "judge"}}
"""A policy of runs whose agents ask no model: they have no policy server."""


def stopping_pool(images: Images, placed: Object | None = None, **spec: Any) -> Object:
    """A pool of one worker whose agents stop at the barrier."""
    made = runs.pool(images, script=agents.script("stopping"), network={"egress": [barrier.EGRESS]}, **spec)
    if spec.get("isolation") == "Job":
        del made["spec"]["rolloutsPerWorker"]
    pod = made["spec"]["template"]["spec"]
    pod |= (placed or {"spec": {}})["spec"]
    pod["containers"][0] |= {"env": [barrier.ENV], "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    return made


def stopping_run(steps: int, **templates: Object) -> Object:
    """A run of eight rollouts a step, with pod templates for its parts."""
    made = runs.collecting(
        steps=steps, rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": 2, "groupSize": ROLLOUTS // 2}
    )
    collector = templates.pop("collector", None)
    if collector is not None:
        made["spec"]["traces"] = {"collector": {"template": collector}}
    for part, template in templates.items():
        made["spec"].setdefault(part, {})["template"] = template
    return made


def near(node: str) -> Object:
    """A pod template that prefers a node, and takes another when that is closed."""
    there = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    preferred = [{"weight": 100, "preference": there}]
    return {"spec": {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}}


def workers(api: Api) -> list[str]:
    """Names of two nodes that take pods."""
    found = [node["metadata"]["name"] for node in api.listed(NODE, selector=f"!{CONTROL_PLANE}")]
    assert len(found) >= 2, "needs two nodes that take pods"
    return sorted(found)[:2]


def pods_of_run(namespace: Namespace) -> dict[str, str]:
    """uid of each pod of the run."""
    pods = namespace.pods(f"{names.LABEL_RUN}=run")
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def in_midst(gate: Barrier, step: int) -> dict[str, str]:
    """The rollouts that stand at the barrier in a step, with their attempts, once all slots are taken."""
    return {said["rollout"]: said["attempt"] for said in gate.until(f"step-{step}", SLOTS, seconds=START_SECONDS)}


@contextmanager
def kubelet_stopped(api: Api, node: str) -> Iterator[None]:
    """Stop the agent of Kubernetes on a node; the pods there live on."""
    nodes.on(node, "systemctl", "stop", "kubelet")
    try:
        yield
    finally:
        nodes.on(node, "systemctl", "start", "kubelet")
        until_node(api, node, "True", seconds=90)


def until_node(api: Api, name: str, ready: str, *, seconds: float) -> None:
    """Return once the cluster says so of a node."""

    def is_so(node: Object) -> bool:
        return any(one["type"] == "Ready" and one["status"] == ready for one in node["status"]["conditions"])

    api.until_object(NODE, name, None, is_so, f"node {name} Ready={ready}", seconds=seconds)
