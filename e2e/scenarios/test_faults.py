"""Parts of a run killed, pods evicted, rows that cannot be given to any agent: what counts is what is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.harness import barrier, nodes, runs
from e2e.harness.api import Api, Object, is_true
from e2e.harness.audit import audited
from e2e.harness.barrier import Barrier
from e2e.harness.images import Images
from e2e.harness.kinds import LEASE, POD
from e2e.harness.kubectl import Kubectl
from e2e.harness.ledger import Ledger
from e2e.harness.namespace import Namespace
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core

AGENTS = Path(__file__).parents[1] / "agents"
START_SECONDS = 90.0
"""Until the first agents of a run are in the midst of their rollouts."""
STEP_SECONDS = 60.0
"""Until the agents of the next step are."""
RETURN_SECONDS = 60.0
"""Until a part that was killed is there again."""

SLOTS = 4
"""Agents at once. Of the eight rollouts of a step two are done, four run and two wait when all slots are taken: the
first of each group does not stop at the barrier."""


def test_killed_parts_cost_no_rollout(  # noqa: PLR0917
    api: Api,
    kubectl: Kubectl,
    images: Images,
    release: Release,
    namespace: Namespace,
    store: ObjectStore,
    tmp_path: Path,
) -> None:
    """One part after the other is killed in mid-step: every rollout counts once, and nothing that is not proven."""
    nodes.require()
    namespace.apply(
        stopping_pool(images),
        runs.collecting(steps=5, rollouts={"poolRef": {"name": "pool"}, "tasksPerStep": 2, "groupSize": 4}),
    )
    with barrier.barrier(namespace, images) as gate:
        in_midst(gate, 1, START_SECONDS)
        before = leader(api, release)
        api.delete(POD, before, release.namespace, grace=0)
        gate.open("step-1")

        # rollouts go on without an operator
        cut_off = in_midst(gate, 2, STEP_SECONDS)
        kill(namespace, names.COMPONENT_GATEWAY)
        gate.open("step-2")

        kept = in_midst(gate, 3, STEP_SECONDS)
        api.until(
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
        nodes.crash(pod_of(namespace, names.COMPONENT_TRAINER), "trainer")
        runs.until_status(
            namespace,
            "run",
            lambda status: status.get("restarts") == 1,
            "the trainer's restart",
            seconds=RETURN_SECONDS,
        )
        gate.open("step-5")
        run = runs.until_finished(namespace, "run", seconds=120)

    runs.assert_succeeded(run)
    assert audited(kubectl, run, tmp_path, 5) == {names.CLASS_SUCCEEDED: 40}
    status, ledger = run["status"], Ledger(store, run)
    assert (status["step"], status["restarts"], status["rolloutsSucceeded"]) == (5, 1, 40)
    assert status.get("rolloutsExcluded", 0) == status.get("rolloutsFailed", 0) == 0
    ended = {rollout["rollout"]: rollout for step in range(1, 6) for rollout in ledger.commit(step)}
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
        script=(AGENTS / "stopping.py").read_text(),
        rolloutsPerWorker=SLOTS,
        network={"egress": [barrier.EGRESS]},
        **spec,
    )
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def in_midst(gate: Barrier, step: int, seconds: float) -> dict[str, str]:
    """The rollouts that stand at the barrier in a step, with their attempts, once all slots are taken."""
    return {said["rollout"]: said["attempt"] for said in gate.until(f"step-{step}", SLOTS, seconds=seconds)}


def leader(api: Api, release: Release) -> str:
    """Name of the operator's pod that acts."""
    (lease,) = api.listed(LEASE, release.namespace)
    holder = str(lease["spec"]["holderIdentity"])
    return next(name for name in release.operators() if holder.startswith(name))


def pod_of(namespace: Namespace, component: str) -> Object:
    """The one pod of a part of the run."""
    (pod,) = namespace.pods(f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={component}")
    return pod


def kill(namespace: Namespace, component: str) -> None:
    """Kill the one pod of a part without a word of warning, and wait until another is ready in its place."""
    selector = f"{names.LABEL_RUN}=run,{names.LABEL_COMPONENT}={component}"
    gone = pod_of(namespace, component)
    namespace.delete(POD, gone["metadata"]["name"], grace=0)
    namespace.until(
        POD,
        lambda pods: any(
            is_true(pod, "Ready") and pod["metadata"]["uid"] != gone["metadata"]["uid"] for pod in pods.values()
        ),
        f"another {component}",
        seconds=RETURN_SECONDS,
        selector=selector,
    )
