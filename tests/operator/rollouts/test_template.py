"""Templates of pools that the API lets through and no pod can be made of: the user is told, and nothing breaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_operator.overlay import OverlayRefusedError
from tests.operator.rollouts import rendering

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"$patch": "replace"}, "spec.template.spec.$patch: found a directive"),
    ({"securityContext": {"$patch": "delete"}}, "spec.template.spec.securityContext.$patch"),
    ({"agent": {"$patch": "delete"}}, "spec.template.spec.containers[0].$patch"),
    ({"agent": {"resources": "1"}}, "spec.template.spec.containers[agent].resources: found '1'; an object"),
    ({"agent": {"resources": {"limits": [1]}}}, "containers[agent].resources.limits: found [1]; an object"),
    ({"agent": {"volumeMounts": "data"}}, "containers[agent].volumeMounts: found 'data'; a list"),
    ({"agent": {"volumeMounts": [{"name": "data"}]}}, "containers[agent].volumeMounts[0]: found an object; an object"),
    ({"agent": {"image": None}}, "spec.template.spec.containers[agent].image: found nothing; in a cluster"),
    ({"agent": {"image": " "}}, "spec.template.spec.containers[agent].image: found ' '; in a cluster"),
    ({"initContainers": [{"name": "data"}]}, "spec.template.spec.initContainers[data].image: found nothing"),
    ({"initContainers": [{"name": "data", "image": 1}]}, "spec.template.spec.initContainers[data].image: found 1"),
    ({"metadata": {"labels": "team=a"}}, "spec.template.metadata.labels: found 'team=a'; an object"),
    (
        {"agent": {"volumeMounts": [{"name": "kitestring-keys", "mountPath": "/keys"}]}},
        "containers[agent].volumeMounts[0].name: found kitestring-keys; what lies there is for Kitestring's own",
    ),
    (
        {"agent": {"livenessProbe": {}}},
        "containers[agent].livenessProbe: found an object; one that fails would kill",
    ),
    ({"agent": {"startupProbe": {}}}, "containers[agent].startupProbe: found an object; one that fails would kill"),
]


def pool(change: dict[str, Any]) -> dict[str, Any]:
    made = rendering.pool_of("worker")
    template = made["spec"]["template"]
    change = dict(change)
    template.setdefault("metadata", {}).update(change.pop("metadata", {}))
    template["spec"]["containers"][0].update(change.pop("agent", {}))
    template["spec"].update(change)
    return made


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_the_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OverlayRefusedError) as caught:
        rendering.objects_of(rendering.context(pool(change)))
    assert message in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["x", "/tmp", "kitestring-keys"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["name", "mountPath", "requests", "limits", "labels", "cpu", "$patch"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@given(
    spec=st.dictionaries(st.sampled_from(["tolerations", "affinity", "nodeSelector", "hostAliases"]), VALUES),
    agent=st.dictionaries(st.sampled_from(["resources", "volumeMounts", "ports", "envFrom", "livenessProbe"]), VALUES),
    metadata=st.dictionaries(st.sampled_from(["labels", "annotations", "name"]), VALUES),
)
def test_any_template_makes_a_pod_or_is_refused(
    spec: dict[str, Any], agent: dict[str, Any], metadata: dict[str, Any]
) -> None:
    try:
        rendering.objects_of(rendering.context(pool({**spec, "agent": agent, "metadata": metadata})))
    except OverlayRefusedError as error:
        assert "spec.template" in str(error)
