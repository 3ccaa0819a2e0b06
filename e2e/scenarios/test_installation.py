"""The chart on a real cluster: what `helm install` leaves, and the same from one rendered file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from e2e.harness import runs
from e2e.harness.api import Api, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import DEFINITION, DEPLOYMENT, LEASE, NAMESPACE, POOL, RUN
from e2e.harness.kubectl import Kubectl, call
from e2e.harness.namespace import Namespace
from e2e.harness.release import Release, definitions, helm
from e2e.node import layout
from kitestring_rollout.storage import ObjectExists, ObjectStore

RENDERED: Final = layout.REPOSITORY / "build" / "install.yaml"
PLAIN: Final = "kitestring"
"""What `make manifests` calls the installation and its namespace."""

pytestmark = pytest.mark.core


def test_operator_and_definitions_are_there(api: Api, release: Release) -> None:
    """Both operators are available, one of them leads, and the API knows both kinds."""
    deployment = api.get(DEPLOYMENT, release.namespace, release.namespace)
    assert deployment is not None and is_true(deployment, "Available")
    assert len(release.operators()) == deployment["spec"]["replicas"] == 2
    for name in definitions():
        definition = api.get(DEFINITION, name)
        assert definition is not None and is_true(definition, "Established")
    leases = api.until(
        LEASE,
        lambda found: any(lease["spec"].get("holderIdentity") for lease in found.values()),
        "a leader among the operators",
        seconds=30,
        namespace=release.namespace,
    )
    holders = {lease["spec"]["holderIdentity"] for lease in leases.values()}
    assert len(holders) == 1


def test_storage_keeps_what_it_is_given(store: ObjectStore) -> None:
    """The chart's object storage takes an object, gives it back, and refuses to overwrite where it must not."""
    key = "e2e/probe"
    store.put(key, b"kept", if_absent=True)
    with pytest.raises(ObjectExists):
        store.put(key, b"another", if_absent=True)
    assert store.get(key) == b"kept"
    store.delete(key)
    assert not store.exists(key)


@pytest.mark.full
def test_rendered_file_is_an_installation(
    kubectl: Kubectl, images: Images, release: Release, namespace: Namespace, tmp_path: Path
) -> None:
    """`kubectl apply` of what `make manifests` writes, on a cluster that has nothing of it, carries a run out."""
    assert release.api.get(NAMESPACE, PLAIN) is None, f"the cluster has a namespace {PLAIN}, which would be replaced"
    values = tmp_path / "values.json"
    values.write_text(json.dumps(release.values))
    call(["make", "manifests", f"HELM={helm()}", f"HELM_ARGS=--values {values}"], cwd=layout.REPOSITORY)
    release.remove()
    try:
        kubectl("apply", "--filename", str(RENDERED))
        rollout = ["rollout", "status", f"deployment/{PLAIN}", "--timeout=180s"]
        kubectl.in_namespace(PLAIN)(*rollout, seconds=200)
        namespace.apply(runs.pool(images), runs.collecting(steps=1))
        runs.assert_succeeded(runs.until_finished(namespace, "run", seconds=180))
        for kind, name in ((RUN, "run"), (POOL, "pool")):
            namespace.delete(kind, name)
            namespace.until_gone(kind, seconds=60, name=name)
    finally:
        kubectl("delete", "--ignore-not-found", "--filename", str(RENDERED), seconds=180)
        release.install()
