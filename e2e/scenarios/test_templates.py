"""What a user's templates and namespaces bring: containers beside ours, and a quota without room."""

from __future__ import annotations

import pytest

from e2e.harness import runs
from e2e.harness.api import Object
from e2e.harness.images import Images
from e2e.harness.kinds import POD, QUOTA
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase

pytestmark = pytest.mark.full

LOOK_SECONDS = 150.0
"""Until the operator has asked why pods are not there: after half a minute, at the next resync."""
END_SECONDS = 180.0


def test_containers_of_the_users_end_with_ours(images: Images, namespace: Namespace) -> None:
    """An exporter beside the trainer and a proxy beside the agent, which never end by themselves, keep neither the run
    nor a rollout from ending."""
    pool = runs.pool(images, isolation="Job", replicas=2)
    pool["spec"]["template"]["spec"]["containers"].append(endless(images, "proxy"))
    beside = {"template": {"spec": {"containers": [endless(images, "exporter")]}}}
    run = runs.collecting(steps=1)
    run["spec"]["trainer"] |= beside
    namespace.apply(pool, run)
    trainer = namespace.until(
        POD,
        lambda pods: any(has_run(pod, "exporter") for pod in pods.values()),
        "the exporter beside the trainer",
        seconds=END_SECONDS,
        selector=f"{names.LABEL_COMPONENT}={names.COMPONENT_TRAINER}",
    )
    assert len(trainer) == 1
    ended = runs.until_finished(namespace, "run", seconds=END_SECONDS)
    runs.assert_succeeded(ended)
    assert (ended["status"]["rolloutsSucceeded"], ended["status"]["rolloutsRetried"]) == (4, 0)


def test_quota_without_room_is_told(images: Images, namespace: Namespace) -> None:
    """The API server makes no pod of the run: its status says why, and the run starts when there is room."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    namespace.apply(quota, runs.pool(images), runs.collecting(steps=1))
    told = runs.until_status(
        namespace,
        "run",
        lambda status: "exceeded quota: none" in str(status.get("message")),
        "word of the quota",
        seconds=LOOK_SECONDS,
    )
    assert told["status"]["phase"] in (Phase.PENDING, Phase.STARTING), told["status"]
    namespace.delete(QUOTA, "none")
    runs.assert_succeeded(runs.until_finished(namespace, "run", seconds=3 * END_SECONDS))


def endless(images: Images, name: str) -> Object:
    """A container that runs until it is told to end."""
    script = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit()); signal.pause()"
    return {"name": name, "image": images.python, "command": ["python3", "-c", script]}


def has_run(pod: Object, container: str) -> bool:
    """Whether it has been started, as a container or as one of those that run beside."""
    status = pod.get("status", {})
    entries = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return any(entry["name"] == container and entry.get("started") for entry in entries)
