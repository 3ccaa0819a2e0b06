"""A trainer of several nodes: one pod for each, which are one Ray cluster, and end as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import agents, barrier, nodes, runs
from e2e.harness.api import Object
from e2e.harness.audit import audited
from e2e.harness.checkpoints import assert_usable
from e2e.harness.images import Images
from e2e.harness.kinds import OF_A_RUN, POD, RUN
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_operator.parts.trainer import LABEL_INDEX, LABEL_JOB
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.full

TRAINER_SECONDS = 300.0
"""Until a trainer of two nodes is there and has made what is asked for."""
END_SECONDS = 120.0
SLOTS = 4
ROLLOUTS = 8
"""Of a step."""


@pytest.mark.timeout(900, func_only=True)
def test_two_nodes_train_as_one(images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path) -> None:
    """Two pods on two machines share the updates; the second dies in mid-step, and both go on from the last state."""
    nodes.require()
    namespace.apply(stopping_pool(images), training_on_two_nodes())
    with barrier.barrier(namespace, images) as gate:
        gate.open("step-1")
        gate.until("step-2", SLOTS, seconds=TRAINER_SECONDS)
        head, other = trainer_pods(namespace, 1)
        assert head["spec"]["nodeName"] != other["spec"]["nodeName"]
        assert_one_cluster(namespace, head, other)

        nodes.crash(other, "trainer")
        restarted = runs.until_status(
            namespace, "run", lambda status: status.get("restarts") == 1, "the restart", seconds=60
        )
        assert other["metadata"]["name"] in restarted["status"]["message"], "whose end it was"
        gate.open("step-2")
        runs.until_step(namespace, "run", 2, seconds=TRAINER_SECONDS)
        assert_one_cluster(namespace, *trainer_pods(namespace, 2))
        gate.open("step-3")
        run = runs.until_finished(namespace, "run", seconds=END_SECONDS)

    runs.assert_succeeded(run)
    assert (run["status"]["step"], run["status"]["restarts"]) == (3, 1)
    assert audited(namespace.kubectl, run, tmp_path, 3) == {names.CLASS_SUCCEEDED: 3 * ROLLOUTS}
    assert_usable(store, run, tmp_path / "checkpoint")
    assert Ledger(store, run).resumed_steps() == [0, 1]
    namespace.until(
        POD,
        lambda pods: all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods.values()),
        "the end of all pods",
        seconds=END_SECONDS,
        selector=f"{names.LABEL_RUN}=run",
    )

    namespace.delete(RUN, "run")
    for kind in OF_A_RUN:
        namespace.until_gone(kind, seconds=END_SECONDS, selector=f"{names.LABEL_RUN}=run")


def stopping_pool(images: Images) -> Object:
    """A pool of one worker whose agents stop at the barrier. Every other agent of a group is worth something, so that
    there is something to learn, whatever the model says."""
    reward = 'print("good" if int(os.environ["KITESTRING_ROLLOUT"][-3:]) % 2 else "bad")\n'
    made = runs.pool(
        images,
        script=agents.script("stopping") + reward,
        rolloutsPerWorker=SLOTS,
        network={"egress": [barrier.EGRESS]},
        reward={"source": "builtin", "builtin": {"kind": "regex", "pattern": "good$"}},
    )
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def training_on_two_nodes() -> Object:
    """Three steps on CPU, with the pods of the trainer on machines of their own."""
    apart = {"labelSelector": {"matchLabels": TRAINER}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    return runs.collecting(
        steps=3,
        rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": 2, "groupSize": ROLLOUTS // 2},
        algorithm={"maxRowTokens": {"prompt": 128, "response": 256}},
        trainer={"backend": "verl", "device": "cpu", "nodes": 2, "template": {"spec": {"affinity": affinity}}},
        checkpoints={"every": 3, "keep": 1},
    )


TRAINER = {names.LABEL_RUN: "run", names.LABEL_COMPONENT: names.COMPONENT_TRAINER}


def trainer_pods(namespace: Namespace, number: int) -> list[Object]:
    """The pods of a trainer Job, by their index, each of which has one."""
    pods = namespace.pods(f"{LABEL_JOB}=run-trainer-{number}")
    found = sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][LABEL_INDEX]))
    assert [pod["metadata"]["labels"][LABEL_INDEX] for pod in found] == ["0", "1"]
    for index, pod in enumerate(found):
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"run-trainer-{number}-{index}", "run-ray")
        assert pod["status"]["phase"] == "Running"
    return found


def assert_one_cluster(namespace: Namespace, head: Object, other: Object) -> None:
    """Ray knows the two, and a training process runs on either."""
    addresses = ", ".join(sorted(pod["status"]["podIP"] for pod in (head, other)))
    log = namespace.api.logs(head["metadata"]["name"], namespace.name, "trainer", tail=10_000)
    assert f"2 of 2 machines are there: {addresses}" in log
    for pod in (head, other):
        command = "grep -l 'ray::Worker[D]ict' /proc/[0-9]*/cmdline | wc -l"
        assert namespace.exec(pod["metadata"]["name"], "trainer", "sh", "-c", command).strip() == "1"
