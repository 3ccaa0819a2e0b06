"""Isolation Job: one Job for each rollout, its image by the task, and whose fault it is when it ends badly."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import agents, barrier, runs
from e2e.harness.api import Object
from e2e.harness.audit import audited
from e2e.harness.images import Images
from e2e.harness.kinds import JOB, POD, SECRET
from e2e.harness.kubectl import Kubectl
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core

START_SECONDS = 90.0
END_SECONDS = 180.0
SELECTOR = f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={names.COMPONENT_ROLLOUT}"
REPLICAS = 3
PODS = 7
"""Of the rollouts: none for the task whose image is not allowed, two for each that is tried again."""
ABSENT = "kitestring-e2e/absent:1"
FORBIDDEN = "registry.example.com/forbidden:1"


def test_each_rollout_has_a_job_of_its_own(
    kubectl: Kubectl, images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """Images and resources by the task; what is killed is done again, and every other end is told apart."""
    tasks: list[dict[str, Any]] = [
        {"question": "plain", "image": images.python},
        {"question": "plain", "image": images.agent},
        {"question": "plain", "image": FORBIDDEN},
        {"question": "plain", "image": ABSENT},
        {"question": "fill the memory", "resources": {"limits": {"memory": "64Mi"}}},
        {"question": "stop at the barrier"},
    ]
    pool = runs.pool(
        images,
        script=agents.script("told"),
        replicas=REPLICAS,
        isolation="Job",
        allowedImages=[images.python, images.agent, ABSENT],
        perTask={"imageField": "image", "resourcesField": "resources"},
        attempts={"max": 2},
        network={"egress": [barrier.EGRESS]},
    )
    container = pool["spec"]["template"]["spec"]["containers"][0]
    # images that were made here are on the nodes; with IfNotPresent the kubelet would ask for a minute for the absent
    container |= {"env": [barrier.ENV], "imagePullPolicy": "Never" if images.mounted else "IfNotPresent"}
    namespace.apply(
        pool,
        runs.collecting(
            steps=1,
            tasks={"train": {"inline": [{"answer": "any"} | task for task in tasks]}, "hiddenFields": ["answer"]},
            rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": len(tasks), "groupSize": 1, "minGroupSize": 1},
        ),
    )
    with barrier.barrier(namespace, images) as gate, ThreadPoolExecutor() as threads:
        watched = threads.submit(watch_pods, namespace)
        (standing,) = gate.until("step-1", 1, seconds=START_SECONDS)
        victim = pod_of(namespace, standing["rollout"])
        namespace.kubectl("delete", "pod", victim["metadata"]["name"], "--grace-period=0", "--force")
        until_pod_after(namespace, victim)
        gate.open("step-1")
        run = runs.until_finished(namespace, "run", seconds=END_SECONDS)
        pods, most = watched.result(timeout=30)
    runs.assert_succeeded(run)

    ended = {
        tasks[rollout["task"]].get("image", tasks[rollout["task"]]["question"]): rollout
        for rollout in Ledger(store, run).commit(1)
    }
    for image in (images.python, images.agent):
        assert ended[image]["class"] == names.CLASS_SUCCEEDED
    forbidden, absent = ended[FORBIDDEN], ended[ABSENT]
    assert forbidden["class"] == names.CLASS_INVALID_TASK and FORBIDDEN in forbidden["reason"]
    assert "allowedImages" in forbidden["reason"]
    assert absent["class"] == names.CLASS_INFRASTRUCTURE and ABSENT in absent["reason"]
    assert absent["tries"] == 2 and absent["excluded"]
    filled = ended["fill the memory"]
    assert filled["class"] == names.CLASS_AGENT_FAILED, filled
    # where the kernel ends one process of a container and not all, nobody says that it was for memory
    assert "memory" in filled["reason"] or "signal 9" in filled["reason"]
    stopped = ended["stop at the barrier"]
    assert (stopped["class"], stopped["tries"]) == (names.CLASS_SUCCEEDED, 2)
    assert stopped["attempt"] != standing["attempt"]
    assert audited(kubectl, run, tmp_path, 1) == {
        names.CLASS_SUCCEEDED: 3,
        names.CLASS_AGENT_FAILED: 1,
        names.CLASS_INFRASTRUCTURE: 1,
        names.CLASS_INVALID_TASK: 1,
    }
    status = run["status"]
    assert (status["rolloutsSucceeded"], status["rolloutsFailed"], status["rolloutsExcluded"]) == (3, 1, 3)
    assert status["rolloutsRetried"] == 1, "an agent that never started made no attempt"

    assert most <= REPLICAS
    assert Counter(rollout for rollout, _ in pods.values()) == {
        rollout["rollout"]: rollout["tries"] for rollout in ended.values() if rollout is not forbidden
    }
    assert Counter(image for _, image in pods.values()) == {images.python: 4, images.agent: 1, ABSENT: 2}
    for kind in (JOB, SECRET):
        namespace.until_gone(kind, seconds=15, selector=names.LABEL_ROLLOUT)


def test_agent_needs_nothing_of_its_image(images: Images, namespace: Namespace, store: ObjectStore) -> None:
    """One static program is enough, as the image of a task and as that of a pool: no shell, no C library, no Python."""
    tasks = [{"question": "2 + 3 =", "worth": worth, "image": images.static} for worth in (0.25, 0.75)]
    by_task = one_program(
        images,
        "by-task",
        images.python,  # which has no such program
        isolation="Job",
        perTask={"imageField": "image"},
        allowedImages=[images.static],
    )
    for pool in (by_task, one_program(images, "worker", images.static, isolation="Worker")):
        name = pool["metadata"]["name"]
        rollouts = {"poolRef": {"name": name}, "tasksPerStep": len(tasks), "groupSize": 1, "minGroupSize": 1}
        run = runs.collecting(name, steps=1, tasks={"train": {"inline": tasks}}, rollouts=rollouts)
        namespace.apply(pool, run)
    for name in ("by-task", "worker"):
        run = runs.until_finished(namespace, name, seconds=END_SECONDS)
        runs.assert_succeeded(run)
        ledger = Ledger(store, run)
        committed, attempts = ledger.commit(1), ledger.attempts()
        assert {(one["class"], one["excluded"], one["tries"]) for one in committed} == {
            (names.CLASS_SUCCEEDED, None, 1)
        }
        rewards = {one["task"]: (one["reward"], one["reward_source"]) for one in committed}
        assert rewards == {number: (task["worth"], "agent") for number, task in enumerate(tasks)}, name
        for rollout in committed:
            attempt = attempts[rollout["attempt"]]
            (call,) = attempt.calls()
            said, reply = json.loads(attempt.end.output or ""), call.choices[0].message or {}
            assert said == {"answer": reply["content"], "files": ["/agent"]}, f"{name}: the image has nothing else"


def one_program(images: Images, name: str, image: str, **spec: Any) -> Object:
    """A pool of the agent `/agent`, which reads its task from a file, writes its output to one and rewards itself."""
    protocol = {"task": {"from": "file"}, "output": {"from": "file"}}
    made = runs.pool(images, name, agentProtocol=protocol, reward={"source": "agent"}, **spec)
    made["spec"]["template"]["spec"]["containers"][0] |= {"image": image, "command": ["/agent"]}
    return made


def watch_pods(namespace: Namespace) -> tuple[dict[str, tuple[str, str]], int]:
    """Rollout and image of every pod of a rollout that there was, by its uid, and how many were there at once at most.

    Returns when they are gone and the run has ended.
    """
    pods: dict[str, tuple[str, str]] = {}
    most = 0

    def ended(found: dict[str, Object]) -> bool:
        nonlocal most
        most = max(most, sum(lives(pod) for pod in found.values()))
        for pod in found.values():
            image = next(one["image"] for one in pod["spec"]["containers"] if one["name"] == "agent")
            pods[pod["metadata"]["uid"]] = (pod["metadata"]["labels"][names.LABEL_ROLLOUT], image)
        return len(pods) >= PODS and not found

    namespace.until(POD, ended, "pods of all rollouts, and their end", seconds=END_SECONDS, selector=SELECTOR)
    return pods, most


def until_pod_after(namespace: Namespace, gone: Object) -> None:
    """Return once the rollout of a pod that was killed has another."""
    rollout = gone["metadata"]["labels"][names.LABEL_ROLLOUT]
    namespace.until(
        POD,
        lambda pods: any(pod["metadata"]["uid"] != gone["metadata"]["uid"] for pod in pods.values()),
        f"another pod of {rollout}",
        seconds=END_SECONDS,
        selector=f"{SELECTOR},{names.LABEL_ROLLOUT}={rollout}",
    )


def lives(pod: Object) -> bool:
    """Whether a pod works or may come to work. One whose image is not there is given up and goes."""
    if pod["status"]["phase"] not in ("Pending", "Running") or "deletionTimestamp" in pod["metadata"]:
        return False
    states = [status.get("state") or {} for status in pod["status"].get("containerStatuses") or ()]
    return not any("Image" in (state.get("waiting") or {}).get("reason", "") for state in states)


def pod_of(namespace: Namespace, rollout: str) -> Object:
    """The pod of a rollout."""
    (pod,) = namespace.pods(f"{SELECTOR},{names.LABEL_ROLLOUT}={rollout}")
    return pod
