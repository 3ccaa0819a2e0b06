"""What a user gets wrong in a pool is said while it can be corrected, and what keeps agents from starting is told."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.harness import runs
from e2e.harness.api import Object, condition
from e2e.harness.images import Images
from e2e.harness.kinds import EVENT, JOB, POOL, RUN
from e2e.harness.kubectl import CommandFailed
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_api.v1alpha1.status import ConditionType, Phase

pytestmark = pytest.mark.full

LOOK_SECONDS = 30.0
START_SECONDS = 90.0
END_SECONDS = 180.0
ABSENT = "kitestring-e2e/absent:1"
GUESSING = "print(4)"
"""An agent that asks no model."""


@pytest.mark.parametrize("isolation", ["Worker", "Job"])
def test_pool_is_corrected_in_place_until_its_run_starts(images: Images, namespace: Namespace, isolation: str) -> None:
    """A pool as it is right on one machine, without an image, then one that only the API server can judge: the run
    waits, has made no trainer, and starts when the pool is put right. From then on the pool is fixed."""
    pool = runs.pool(images, script=GUESSING, isolation=isolation)
    right = pool["spec"]["template"]["spec"]["containers"][0]
    without = {field: value for field, value in right.items() if field != "image"}
    set_agent(pool, without)
    namespace.apply(pool, runs.collecting(steps=1, policies=[runs.ELSEWHERE]))
    until_refused(namespace, "spec.template.spec.containers[agent].image: found nothing")

    correct(namespace, right | {"volumeMounts": [{"name": "data", "mountPath": "/data"}]})
    until_refused(namespace, 'Not found: "data"')
    assert namespace.get(POOL, "pool")["status"]["runs"] == 0

    correct(namespace, right)
    namespace.until_object(POOL, "pool", is_used, "in use", seconds=LOOK_SECONDS)
    with pytest.raises(CommandFailed) as refused:
        change = '{"spec": {"limits": {"seconds": 30}}}'
        namespace.kubectl("patch", "rolloutpool/pool", "--type=merge", "--patch", change)
    assert "delete the runs in status.users" in refused.value.stderr
    run = runs.until_finished(namespace, "run", seconds=END_SECONDS)
    runs.assert_succeeded(run)
    assert condition(run, ConditionType.ACCEPTED)["status"] == "True"


def test_agent_whose_image_cannot_be_had_is_told_of_once(images: Images, namespace: Namespace) -> None:
    """The trainer works and the run is Running, though no rollout will ever end: one Event says why."""
    pool = runs.pool(images, script=GUESSING)
    agent = pool["spec"]["template"]["spec"]["containers"][0]
    # images that were made here are on the nodes; with IfNotPresent the kubelet would ask for a minute for the absent
    policy = "Never" if images.mounted else "IfNotPresent"
    set_agent(pool, agent | {"image": ABSENT, "imagePullPolicy": policy})
    namespace.apply(pool, runs.collecting(steps=1, policies=[runs.ELSEWHERE]))
    namespace.until(EVENT, lambda _: len(told(namespace)) > 0, "an Event about the image", seconds=START_SECONDS)
    run = namespace.until_object(
        RUN, "run", is_running_without_agents, "Running, RolloutsReady false", seconds=START_SECONDS
    )
    assert ABSENT in condition(run, ConditionType.ROLLOUTS_READY)["message"]
    (event,) = told(namespace)
    assert (event["type"], event.get("count")) == ("Warning", 1)
    assert ABSENT in event["message"]


def set_agent(pool: Object, agent: dict[str, Any]) -> None:
    pool["spec"]["template"]["spec"]["containers"] = [agent]


def correct(namespace: Namespace, agent: dict[str, Any]) -> None:
    """What a user writes into the pool."""
    namespace.patch(POOL, "pool", {"spec": {"template": {"spec": {"containers": [agent]}}}})


def until_refused(namespace: Namespace, why: str) -> None:
    """Return once the run says so, and hold that it has not started."""

    def says(run: Object) -> bool:
        return why in condition(run, ConditionType.ACCEPTED).get("message", "")

    run = namespace.until_object(RUN, "run", says, f"refused: {why}", seconds=LOOK_SECONDS)
    assert (run["status"]["phase"], run["status"]["reason"]) == (Phase.PENDING, names.REASON_INVALID_SPEC)
    assert "startTime" not in run["status"]
    assert namespace.listed(JOB, f"{names.LABEL_RUN}=run") == []


def is_used(pool: Object) -> bool:
    users: list[str] = pool.get("status", {}).get("users", [])
    return users == ["run"]


def told(namespace: Namespace) -> list[Object]:
    """Events under the run about an image."""
    return [event for event in namespace.events_of(RUN, "run") if event["reason"] == names.REASON_IMAGE_PULL]


def is_running_without_agents(run: Object) -> bool:
    ready = condition(run, ConditionType.ROLLOUTS_READY)
    is_running = run.get("status", {}).get("phase") == Phase.RUNNING
    return bool(is_running and ready.get("reason") == names.REASON_IMAGE_PULL)
