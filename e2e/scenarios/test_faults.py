"""Parts of a run killed, pods evicted, rows that cannot be given to any agent: what counts is what is proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import agents, barrier, nodes, runs
from e2e.harness.api import Api, Object
from e2e.harness.audit import audited
from e2e.harness.barrier import Barrier
from e2e.harness.images import Images
from e2e.harness.kinds import JOB, LEASE, POD, SECRET
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from e2e.harness.operators import Operators
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core

START_SECONDS = 90.0
"""Until the first agents of a run are in the midst of their rollouts."""
STEP_SECONDS = 60.0
"""Until the agents of the next step are."""
RETURN_SECONDS = 60.0
"""Until a part that was killed is there again."""
RESYNC_SECONDS = 90.0
"""Until the operator's figures are those of now: it counts at each resync."""

SLOTS = 4
"""Agents at once. Of the eight rollouts of a step two are done, four run and two wait when all slots are taken: the
first of each group does not stop at the barrier."""


def test_killed_parts_cost_no_rollout(
    images: Images, release: Release, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """One part after the other is killed in mid-step: every rollout counts once, and nothing that is not proven."""
    nodes.require()
    namespace.apply(
        stopping_pool(images),
        runs.collecting(steps=5, rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": 2, "groupSize": 4}),
    )
    with barrier.barrier(namespace, images) as gate:
        in_midst(gate, 1, START_SECONDS)
        before = leader(release)
        release.api.delete(POD, before, release.namespace, grace=0)
        gate.open("step-1")

        # rollouts go on without an operator
        cut_off = in_midst(gate, 2, STEP_SECONDS)
        nodes.crash(pod_of(namespace, names.COMPONENT_GATEWAY), "gateway")
        gate.open("step-2")

        kept = in_midst(gate, 3, STEP_SECONDS)
        release.api.until(
            LEASE,
            lambda leases: any(
                lease["spec"].get("holderIdentity") not in ("", None, before) for lease in leases.values()
            ),
            "another leader",
            seconds=RETURN_SECONDS,
            namespace=release.namespace,
        )
        kill(namespace, names.COMPONENT_COLLECTOR)
        gate.open("step-3")

        in_midst(gate, 4, STEP_SECONDS)
        kill(namespace, names.COMPONENT_POLICY_SERVER)
        gate.open("step-4")

        in_midst(gate, 5, STEP_SECONDS)
        trainer = pod_of(namespace, names.COMPONENT_TRAINER)["metadata"]["name"]
        said = release.api.logs(trainer, namespace.name, "trainer")
        nodes.crash(pod_of(namespace, names.COMPONENT_TRAINER), "trainer")
        lost = runs.until_status(
            namespace,
            "run",
            lambda status: status.get("restarts") == 1 and "\n" in status.get("lastError", ""),
            "the trainer's restart, and what it said last",
            seconds=RETURN_SECONDS,
        )
        where, *lines = lost["status"]["lastError"].splitlines()
        assert where.startswith(f"pod {trainer}: "), where
        assert set(lines) & set(said.splitlines()), f"{lines} are none of\n{said}"
        gate.open("step-5")
        run = runs.until_finished(namespace, "run", seconds=120)

    runs.assert_succeeded(run)
    status, ledger = run["status"], Ledger(store, run)
    ended = {rollout["rollout"]: rollout for step in range(1, 6) for rollout in ledger.commit(step)}
    assert [one for one in ended.values() if one["class"] != names.CLASS_SUCCEEDED] == []
    assert audited(namespace.kubectl, run, tmp_path, 5) == {names.CLASS_SUCCEEDED: 40}
    assert (status["step"], status["restarts"], status["rolloutsSucceeded"]) == (5, 1, 40)
    assert status.get("rolloutsExcluded", 0) == status.get("rolloutsFailed", 0) == 0
    for rollout in ended.values():
        # whoever did not stop was done before anything was killed
        assert rollout["tries"] == 1 or not rollout["rollout"].endswith("-000"), rollout
    for name in cut_off:
        assert ended[name]["attempt"] != cut_off[name] and ended[name]["tries"] > 1, "its gateway is gone"
    for name in kept:
        assert ended[name]["attempt"] == kept[name], "a collector that is away loses nothing"


def stopping_pool(images: Images, **spec: Any) -> Object:
    """A pool of one worker whose agents stop at the barrier; the model's answer is not what counts."""
    made = runs.pool(
        images,
        script=agents.script("stopping"),
        rolloutsPerWorker=SLOTS,
        network={"egress": [barrier.EGRESS]},
        **spec,
    )
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def in_midst(gate: Barrier, step: int, seconds: float) -> dict[str, str]:
    """The rollouts that stand at the barrier in a step, with their attempts, once all slots are taken."""
    return {said["rollout"]: said["attempt"] for said in gate.until(f"step-{step}", SLOTS, seconds=seconds)}


def leader(release: Release) -> str:
    """Name of the operator's pod that acts."""
    (lease,) = release.api.listed(LEASE, release.namespace)
    holder = str(lease["spec"]["holderIdentity"])
    assert holder in release.operators()
    return holder


def pod_of(namespace: Namespace, component: str) -> Object:
    """The one pod of a part of the run."""
    (pod,) = namespace.pods(f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={component}")
    return pod


def kill(namespace: Namespace, component: str) -> None:
    """Kill the one pod of a part, without a word of warning."""
    namespace.delete(POD, pod_of(namespace, component)["metadata"]["name"], grace=0)


GOOD, EVIL = "plain", "\"\n  - name: evil\n    image: {{evil}}\n'$(id) $(KITESTRING_RUN) `id` %s \\ \u2028 \U0001f9ea\t"
"""A text, and one that would break out of any template, shell or expansion that it were pasted into."""


def test_failures_by_class(
    images: Images, release: Release, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """With a Job for each rollout: what the cluster does to a pod is tried again, what agent or task do is not."""
    nodes.require()
    plain = images.python
    rows: list[dict[str, Any]] = [
        {"do": ["echo", "fail"], "text": GOOD, "answer": GOOD},
        {"do": ["stop"], "text": GOOD, "answer": GOOD},
        {"do": ["echo", "hog"], "text": GOOD, "answer": GOOD, "resources": {"limits": {"memory": "96Mi"}}},
        {"do": ["echo"], "text": EVIL, "answer": EVIL, "image": plain},
        {"do": ["echo"], "text": GOOD, "answer": GOOD, "image": f'{plain}"\n    hostNetwork: true'},
        {"do": ["echo"], "text": GOOD, "answer": GOOD, "image": "docker.io/library/other"},
        {"do": ["echo"], "text": GOOD, "answer": GOOD, "resources": {"limits": {"cpu": "1\nhostPID: true"}}},
        {"do": ["echo"], "text": GOOD},
    ]
    namespace.apply(
        behaving_pool(images, "pool", attempts={"max": 2}),
        behaving_pool(images, "once", attempts={"max": 1}),
        *behaving("run", rows),
        *behaving("never", [rows[0] | {"image": "registry.invalid/agent:1"}], pool="once"),
    )
    with barrier.barrier(namespace, images) as gate:
        stopped = sorted(said["rollout"] for said in gate.until("stop", 2, seconds=START_SECONDS))
        evicted, bereft = (pod_of_rollout(namespace, rollout) for rollout in stopped)
        before = leader(release)
        release.api.delete(POD, before, release.namespace, grace=0)
        evict(namespace.api, evicted)
        nodes.crash(bereft, "worker")
        until_over(namespace, evicted, bereft)
        gate.open("stop")
        run = runs.until_finished(namespace, "run", seconds=120)
    runs.assert_succeeded(run)

    classes = {"Succeeded": 6, "AgentFailed": 2, "InvalidTask": 8}
    assert audited(namespace.kubectl, run, tmp_path, 1) == classes
    by_row: list[list[Any]] = [[] for _ in rows]
    for rollout in sorted(Ledger(store, run).commit(1), key=lambda one: str(one["rollout"])):
        by_row[rollout["task"]].append(rollout)
    mixed, disrupted, hogs, evil, *invalid = by_row
    small = "minGroupSize is 2"
    for first, second in (mixed, hogs):
        assert first["class"] == "Succeeded" and small in first["excluded"], "a group too small to compare"
        assert second["class"] == "AgentFailed" and second["tries"] == 1, "the agent's own doing"
    for one in disrupted:
        assert (one["class"], one["tries"], one["excluded"]) == ("Succeeded", 2, None), "tried again"
    for one in evil:
        assert (one["class"], one["reward"], one["tries"]) == ("Succeeded", 1.0, 1), "handed over as it is"
    for one in (one for pair in invalid for one in pair):
        assert (one["class"], one["excluded"], one["reward"]) == ("InvalidTask", "InvalidTask", None)
        assert one["tries"] <= 1 and one["reason"], "said once, for good"
    for pair, said in zip(invalid, ("hostNetwork", "docker.io/library/other", "resources", "answer"), strict=True):
        assert all(said in one["reason"] for one in pair)
    status = run["status"]
    assert status["rolloutsSucceeded"] == 6 and status["rolloutsFailed"] == 2
    assert status["rolloutsRetried"] == 2 and status["rolloutsExcluded"] == 12
    made = [
        event["involvedObject"]["name"]
        for event in namespace.api.events(namespace.name)
        if event["reason"] == "SuccessfulCreate"
        and event["involvedObject"]["kind"] == "Job"
        and "-r-" in event["involvedObject"]["name"]
    ]
    assert len(made) == len(set(made)) >= 10, "a Job for each try of the four rows that are valid, none twice"

    unpullable = runs.until_finished(namespace, "never", seconds=120)
    runs.assert_succeeded(unpullable)
    for one in Ledger(store, unpullable).commit(1):
        assert (one["class"], one["excluded"], one["reward"]) == ("Infrastructure", "Infrastructure", None)
        assert "registry.invalid/agent:1" in one["reason"]
    assert unpullable["status"]["skippedSteps"] == 1 and unpullable["status"]["rolloutsExcluded"] == 2
    namespace.until_gone(JOB, seconds=30, selector=names.LABEL_ROLLOUT)
    assert namespace.listed(SECRET, names.LABEL_ROLLOUT) == []
    classes |= {"Infrastructure": 2}
    operators = Operators(release, namespace.kubectl)
    operators.until("kitestring_operator_rollouts_by_class", "class", classes, seconds=RESYNC_SECONDS)


def test_one_bad_row_of_a_hundred_costs_no_other(
    images: Images, namespace: Namespace, store: ObjectStore, tmp_path: Path
) -> None:
    """A row that breaks out of templates is handed over as it is; one without a field that is needed fails at once."""
    rows: list[dict[str, Any]] = [{"text": f"row {number}", "answer": f"row {number}"} for number in range(100)]
    rows[41] = {"text": EVIL, "answer": EVIL}
    del rows[71]["answer"]
    echo = "import sys; sys.stdout.write(sys.argv[1])"
    pool = runs.pool(
        images,
        script=echo,
        rolloutsPerWorker=8,
        agentProtocol={"task": {"from": "argument", "format": "text", "field": "text"}},
        reward=EXACTLY,
    )
    namespace.apply(pool, *unserved("run", rows, tasksPerStep=100, groupSize=1, minGroupSize=1))
    run = runs.until_finished(namespace, "run", seconds=START_SECONDS)
    runs.assert_succeeded(run)
    assert audited(namespace.kubectl, run, tmp_path, 1) == {"Succeeded": 99, "InvalidTask": 1}
    by_row = {rollout["task"]: rollout for rollout in Ledger(store, run).commit(1)}
    invalid = by_row.pop(71)
    assert (invalid["class"], invalid["tries"]) == ("InvalidTask", 0) and "answer" in invalid["reason"]
    assert {rollout["reward"] for rollout in by_row.values()} == {1.0}, "each was given exactly its own row"


EXACTLY = {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer", "stripWhitespace": False}}


def behaving_pool(images: Images, name: str, **spec: Any) -> Object:
    """A pool of agents that behave as their tasks say, each in a Job of its own, killed at once when it is to go."""
    made = runs.pool(
        images,
        name,
        script=agents.script("behaving"),
        isolation="Job",
        replicas=4,
        network={"egress": [barrier.EGRESS]},
        perTask={"imageField": "image", "resourcesField": "resources"},
        allowedImages=[f"{images.python.split(':')[0]}*", "registry.invalid/*"],
        agentProtocol={"task": {"from": "argument"}},
        reward=EXACTLY,
        **spec,
    )
    del made["spec"]["rolloutsPerWorker"]
    pod = made["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 1
    pod["containers"][0] |= {"env": [barrier.ENV], "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    return made


def behaving(name: str, rows: list[dict[str, Any]], pool: str = "pool") -> list[Object]:
    """One step of all rows, two rollouts of each."""
    return unserved(name, rows, pool, tasksPerStep=len(rows), groupSize=2)


def unserved(name: str, rows: list[dict[str, Any]], pool: str = "pool", **rollouts: Any) -> list[Object]:
    """A run of one step whose agents ask no model: it has no policy server. Its rows lie in a file, which is read when
    the run has started: those in the run itself are refused with it."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"rows.jsonl": lines}}
    run = runs.collecting(
        name,
        steps=1,
        policies=[runs.ELSEWHERE],
        tasks={"train": {"configMap": {"name": name, "key": "rows.jsonl"}}, "hiddenFields": ["answer"]},
        rollouts={"poolRef": {"name": pool}, **rollouts},
    )
    return [file, run]


def pod_of_rollout(namespace: Namespace, rollout: str) -> Object:
    """The pod in which a rollout runs (isolation: Job)."""
    (pod,) = namespace.pods(f"{names.LABEL_ROLLOUT}={rollout}")
    return pod


def until_over(namespace: Namespace, *pods: Object) -> None:
    """Return once all of the pods have ended."""
    uids = {pod["metadata"]["uid"] for pod in pods}

    def are_over(found: dict[str, Object]) -> bool:
        left = [pod for pod in found.values() if pod["metadata"]["uid"] in uids]
        return all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in left)

    namespace.until(POD, are_over, "the end of the pods", seconds=60)


def evict(api: Api, pod: Object) -> None:
    """What `kubectl drain` says of each pod of a node."""
    metadata = {field: pod["metadata"][field] for field in ("name", "namespace")}
    path = f"{POD.path(metadata['namespace'], metadata['name'])}/eviction"
    api.request("POST", path, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
