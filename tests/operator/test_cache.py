"""The cache: the latest version of each object counts, in whatever order it was told."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kitestring_api import names
from kitestring_operator.cluster.cache import ObjectCache
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.cluster.trimmed import trimmed


def pod(name: str = "p", version: int = 1, uid: str = "u", run: str = "r", **status: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {names.LABEL_RUN: run},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


REF = KINDS["Pod"].ref("n", "p")


def test_older_news_is_no_news() -> None:
    cache = ObjectCache()
    assert cache.observe(pod(version=5, phase="Running"))
    assert not cache.observe(pod(version=5, phase="Running")), "said twice"
    assert not cache.observe(pod(version=3, phase="Pending"))
    found = cache.get(REF)
    assert found is not None and found["status"]["phase"] == "Running"


def test_the_end_of_a_namesake_is_not_the_end_of_this_one() -> None:
    cache = ObjectCache()
    cache.observe(pod(version=9, uid="new"))
    assert not cache.observe(pod(version=8, uid="old"), "DELETED")
    assert cache.get(REF) is not None
    assert cache.observe(pod(version=10, uid="new"), "DELETED")
    assert cache.get(REF) is None and not cache.of_run("n", "r")


def test_objects_of_a_run_are_found_together() -> None:
    cache = ObjectCache()
    cache.observe(pod("a"))
    cache.observe(pod("b", run="other"))
    assert [item["metadata"]["name"] for item in cache.of_run("n", "r")] == ["a"]
    cache.observe(pod("a", version=2, run="other"))
    assert not cache.of_run("n", "r"), "its label has changed"
    assert len(cache.of_run("n", "other")) == 2


def test_a_list_takes_away_what_is_not_in_it_but_not_what_is_newer() -> None:
    cache = ObjectCache()
    cache.observe(pod("stays", 1))
    cache.observe(pod("gone", 2))
    before = cache.versions("Pod")
    cache.observe(pod("made-meanwhile", 7))
    changed = cache.replace("Pod", [pod("stays", 1), pod("new", 6)], before)
    assert {item["metadata"]["name"] for item in changed} == {"gone", "new"}
    assert {item["metadata"]["name"] for item in cache.of_kind("Pod")} == {"stays", "new", "made-meanwhile"}


def test_a_list_does_not_bring_back_what_has_gone_since_it_was_begun() -> None:
    cache = ObjectCache()
    cache.observe(pod("gone", 2))
    before = cache.versions("Pod")
    cache.observe(pod("gone", 3), "DELETED")
    assert not cache.replace("Pod", [pod("gone", 2)], before)
    assert not cache.of_kind("Pod")


def test_what_was_deleted_counts_as_going_until_the_cluster_says_otherwise() -> None:
    cache = ObjectCache()
    cache.observe(pod(version=1))
    cache.mark_deleted(REF, "another")
    assert "deletionTimestamp" not in cache.get(REF)["metadata"]  # type: ignore[index]
    cache.mark_deleted(REF, "u")
    assert "deletionTimestamp" in cache.get(REF)["metadata"]  # type: ignore[index]


@given(st.permutations(range(1, 9)), st.integers(0, 1000))
def test_any_order_comes_to_the_same(order: list[int], seed: int) -> None:
    cache = ObjectCache()
    chance = random.Random(seed)
    for version in order:
        for _ in range(chance.choice([1, 1, 2])):
            cache.observe(pod(version=version, phase=f"phase {version}"))
    found = cache.get(REF)
    assert found is not None and found["status"]["phase"] == "phase 8"


def test_of_a_pod_little_is_kept() -> None:
    whole = pod(
        phase="Running",
        podIP="10.0.0.1",
        containerStatuses=[{"name": "a", "imageID": "x" * 100, "state": {"running": {}}, "ready": True}],
        conditions=[
            {"type": "Ready", "status": "True", "lastProbeTime": None},
            {"type": "Initialized", "status": "True"},
        ],
    )
    whole["spec"] = {"nodeName": "node", "containers": [{"name": "a", "env": [{"name": "X"}]}]}
    whole["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 1000, "mine": "1"}
    whole["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "j", "uid": "o", "controller": True}]
    kept = trimmed(whole)
    assert kept["spec"] == {"nodeName": "node"}
    assert kept["metadata"]["ownerReferences"] == [{"uid": "o", "controller": True}]
    assert kept["status"]["containerStatuses"] == [{"name": "a", "state": {"running": {}}}]
    assert kept["status"]["conditions"] == [{"type": "Ready", "status": "True"}]
    assert kept["metadata"]["annotations"] == {"mine": "1"}
    assert "podIP" not in kept["status"]


def test_what_recurs_is_kept_once() -> None:
    first, second = (trimmed(json.loads(json.dumps(pod(phase="Running", reason="Evicted")))) for _ in range(2))
    assert first["status"]["reason"] is second["status"]["reason"]


def test_of_a_secret_nothing_but_its_name_is_kept() -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "namespace": "n"}, "data": {"k": "dg=="}}
    assert "data" not in trimmed(secret)
