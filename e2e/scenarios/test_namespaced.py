"""An installation for some namespaces only: it has rights in these and looks at no other."""

from __future__ import annotations

import pytest

from e2e.harness import agents, barrier, nodes, runs
from e2e.harness.api import Object, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import OF_A_RUN, POD, POOL, RUN
from e2e.harness.kubectl import CommandFailed, Kubectl
from e2e.harness.namespace import Namespace
from e2e.harness.operators import Operators
from e2e.harness.release import OPERATORS, Release
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase

pytestmark = pytest.mark.full

START_SECONDS = 90.0
CHANGE_SECONDS = 60.0
END_SECONDS = 120.0
RESYNC_SECONDS = 15
"""Within them an operator notices that a namespace has gone."""


def test_roles_in_its_namespaces_are_enough(
    kubectl: Kubectl, images: Images, release: Release, namespace: Namespace
) -> None:
    """With `namespaces` a run there is carried out, also when one of them has gone, and none elsewhere is looked at."""
    api = release.api
    going = Namespace.create(api, "going", kubectl)
    outside = Namespace.create(api, "outside", kubectl)
    settings = release.values["settings"] | {"resyncSeconds": RESYNC_SECONDS}
    try:
        with release.changed(namespaces=[namespace.name, going.name], settings=settings):
            assert may(kubectl, release, "list", "secrets", "--namespace", namespace.name)
            assert not may(kubectl, release, "list", "secrets", "--namespace", outside.name)
            assert not may(kubectl, release, "watch", "trainingruns.kitestring.dev", "--all-namespaces")
            # before the other ones: whoever looked at all namespaces would have come by
            outside.apply(runs.pool(images), runs.collecting(steps=1))
            carried_out(images, namespace)
            assert_at_ease(kubectl, release)

            going.remove()
            until_begun_anew(release)
            namespace.apply(runs.pool(images, "other"), runs.collecting("other", pool="other", steps=1))
            runs.assert_succeeded(runs.until_finished(namespace, "other", seconds=END_SECONDS))
            assert f"namespace {going.name} is not served until its Role is there" in logs(release)

            assert "status" not in outside.get(RUN, "run") and "status" not in outside.get(POOL, "pool")
            assert outside.events_of(RUN, "run") == [] and outside.objects_of_run("run") == {}
        runs.until_status(outside, "run", lambda status: "phase" in status, "look of who serves all", seconds=60)
    finally:
        going.remove()
        outside.remove()


def assert_at_ease(kubectl: Kubectl, release: Release) -> None:
    """One of the operators leads, it hears of what changes, and neither misses a right."""
    operators = Operators(release, kubectl)
    assert operators.lease_holder() == operators.leader() in release.operators()
    for kind in (names.KIND_TRAINING_RUN, names.KIND_ROLLOUT_POOL, "Job", "Pod"):
        assert operators.sum("kitestring_operator_watch_events_total", kind=kind) > 0, f"a watch of {kind}"
    assert "forbidden" not in logs(release).lower()


def until_begun_anew(release: Release) -> None:
    """Return once an operator has ended and is there again."""

    def has_restarted(pods: dict[str, Object]) -> bool:
        return any(nodes.status_of(pod, "operator")["restartCount"] > 0 for pod in pods.values())

    release.api.until(
        POD,
        has_restarted,
        "another process of the operator",
        seconds=60,
        namespace=release.namespace,
        selector=OPERATORS,
    )


def logs(release: Release) -> str:
    """Of the operators that are there."""
    return "\n".join(release.api.logs(pod, release.namespace, "operator", tail=10_000) for pod in release.operators())


def carried_out(images: Images, namespace: Namespace) -> None:
    """A run begins, is suspended in mid-step, resumed, ends well, and is deleted with all that is its."""
    namespace.apply(stopping_pool(images), runs.collecting(steps=2))
    with barrier.barrier(namespace, images) as gate:
        gate.until("step-1", 2, seconds=START_SECONDS)
        suspend(namespace, wanted=True)
        runs.until_phase(namespace, "run", Phase.SUSPENDING, Phase.SUSPENDED, seconds=10)  # a watch told of it
        suspended = runs.until_phase(namespace, "run", Phase.SUSPENDED, seconds=CHANGE_SECONDS)
        assert is_true(suspended, "Suspended")
        namespace.until_gone(POD, seconds=5, selector=f"{names.LABEL_RUN}=run")
        gate.open("step-1")
        gate.open("step-2")
        suspend(namespace, wanted=False)
        run = runs.until_finished(namespace, "run", seconds=END_SECONDS)
    runs.assert_succeeded(run)
    assert (run["status"]["step"], run["status"]["rolloutsSucceeded"], run["status"]["restarts"]) == (2, 8, 0)
    assert namespace.events_of(RUN, "run"), "events say what happened"
    namespace.delete(RUN, "run")
    for kind in OF_A_RUN:
        namespace.until_gone(kind, seconds=CHANGE_SECONDS, selector=f"{names.LABEL_RUN}=run")


def stopping_pool(images: Images) -> Object:
    """A pool of agents that stop at the barrier; the first of each group does not."""
    made = runs.pool(images, script=agents.script("stopping"), network={"egress": [barrier.EGRESS]})
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [barrier.ENV]
    return made


def suspend(namespace: Namespace, *, wanted: bool) -> None:
    """`spec.suspend` of the run."""
    namespace.patch(RUN, "run", {"spec": {"suspend": wanted}})


def may(kubectl: Kubectl, release: Release, *what: str) -> bool:
    """Whether the operator's service account has a right."""
    account = f"system:serviceaccount:{release.namespace}:{release.namespace}"
    try:
        kubectl("auth", "can-i", *what, f"--as={account}")
    except CommandFailed as refused:
        assert refused.stdout.startswith("no"), refused
        return False
    return True
