"""The chart on a real cluster: what `helm install` leaves, and what it takes away again."""

from __future__ import annotations

import pytest

from e2e.harness.api import Api, is_true
from e2e.harness.kinds import DEFINITION, DEPLOYMENT, LEASE
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_rollout.storage import ObjectStore

pytestmark = pytest.mark.core


def test_operator_and_definitions_are_there(api: Api, release: Release) -> None:
    """Both operators are available, one of them leads, and the API knows both kinds."""
    deployment = api.get(DEPLOYMENT, release.namespace, release.namespace)
    assert deployment is not None and is_true(deployment, "Available")
    assert len(release.operators()) == deployment["spec"]["replicas"] == 2
    for plural in ("trainingruns", "rolloutpools"):
        definition = api.get(DEFINITION, f"{plural}.{names.GROUP}")
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
    store.put(key, b"kept")
    assert store.get(key) == b"kept"
    store.delete(key)
    assert not store.exists(key)
