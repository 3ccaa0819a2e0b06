"""Names fit where Kubernetes puts them, and stay unique; the digest of an object says when it must be written."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kitestring_api import names
from kitestring_operator import identity

RUNS = st.from_regex(r"\A[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z")
POLICIES = st.from_regex(r"\A[a-z]([-a-z0-9]{0,18}[a-z0-9])?\Z")
ROLLOUTS = st.builds("{}{:06d}-{:08d}-{:03d}".format, st.sampled_from("tgsy"), *[st.integers(0, 999)] * 3)
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@given(RUNS, POLICIES, ROLLOUTS, st.integers(1, 9999))
def test_names_fit_and_are_dns_labels(run: str, policy: str, rollout: str, number: int) -> None:
    stateful = [identity.policy_server_name(run, policy), identity.gateway_name(run)]
    others = [
        identity.trainer_name(run),
        identity.trainer_job_name(run, number),
        identity.ray_name(run),
        identity.collector_name(run),
        identity.worker_job_name(run),
        identity.rollout_job_name(run, rollout, number),
        identity.keys_name(run),
    ]
    # the label controller-revision-hash of a StatefulSet's pods: its name, a dash, ten digits
    assert all(len(name) + 11 <= 63 for name in stateful)
    # the hostname of an Indexed Job's pods: its name, a dash, the index
    assert len(f"{identity.trainer_job_name(run, number)}-1023") <= 63
    assert all(len(name) <= 63 and LABEL.fullmatch(name) for name in [*stateful, *others])


@given(st.lists(st.from_regex(r"\A[a-z][-a-z0-9]{50,70}[a-z0-9]\Z"), min_size=2, max_size=2, unique=True))
def test_long_names_stay_different(given_names: list[str]) -> None:
    first, second = (identity.fitting(name) for name in given_names)
    assert first != second
    assert first == identity.fitting(given_names[0])


def test_short_names_stay_as_they_are() -> None:
    assert identity.fitting("calculator-gateway") == "calculator-gateway"


def test_the_hash_is_that_of_the_content_and_of_nothing_else() -> None:
    manifest: dict[str, Any] = {"metadata": {"name": "a", "annotations": {"b": "c"}}, "spec": {"x": 1, "y": 2}}
    stamped = identity.with_spec_hash(manifest)
    assert stamped["metadata"]["annotations"] == {"b": "c", names.ANNOTATION_SPEC_HASH: identity.spec_hash(manifest)}
    assert identity.with_spec_hash(stamped) == stamped
    assert identity.spec_hash({"spec": {"y": 2, "x": 1}, "metadata": manifest["metadata"]}) == identity.spec_hash(
        manifest
    )
    assert identity.spec_hash(manifest | {"spec": {"x": 2, "y": 2}}) != identity.spec_hash(manifest)
    assert names.ANNOTATION_SPEC_HASH not in manifest["metadata"]["annotations"]
