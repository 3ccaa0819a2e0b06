"""Templates laid over ours: merged as Kubernetes merges them, refused where they would take something of ours away."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_operator.overlay import MERGE_KEYS, WALLS, OverlayRefusedError, merged, overlaid

BASE: dict[str, Any] = {
    "metadata": {"labels": {"kitestring.dev/run": "a"}},
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532},
        "terminationGracePeriodSeconds": 30,
        "initContainers": [{"name": "sidecar", "image": "sidecar:1"}],
        "containers": [
            {
                "name": "server",
                "image": "server:1",
                "args": ["--a"],
                "env": [{"name": "HOME", "value": "/home"}, {"name": "KITESTRING_X", "value": "1"}],
                "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
                "volumeMounts": [
                    {"name": "config", "mountPath": "/etc/kitestring"},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": "c"}}, {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
    },
}


def over(template: dict[str, Any]) -> dict[str, Any]:
    return overlaid(BASE, template, field="spec.template")


def server(pod: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in pod["spec"]["containers"] if one["name"] == "server")


def with_server(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "server", **fields}]}}


def test_nothing_laid_over_is_the_same() -> None:
    assert overlaid(BASE, None, field="f") is BASE
    assert over({}) is BASE
    assert over({"spec": {}}) == BASE


def test_fields_of_the_pod_are_added_and_replaced() -> None:
    spec = over({"spec": {"nodeSelector": {"a": "b"}, "securityContext": {"runAsUser": 7}}})["spec"]
    assert spec["nodeSelector"] == {"a": "b"}
    assert spec["securityContext"] == {"runAsNonRoot": True, "runAsUser": 7}


def test_null_removes_a_field() -> None:
    assert over({"spec": {"securityContext": {"runAsNonRoot": None}}})["spec"]["securityContext"] == {
        "runAsUser": 65532
    }


def test_containers_are_merged_by_name_and_further_ones_come_after() -> None:
    pod = over(
        {
            "spec": {
                "containers": [
                    {"name": "more", "image": "more:1"},
                    {"name": "server", "resources": {"limits": {"cpu": "2"}}},
                ]
            }
        }
    )
    assert [one["name"] for one in pod["spec"]["containers"]] == ["server", "more"]
    assert server(pod)["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}}
    assert server(pod)["args"] == ["--a"]


def test_a_further_init_container_comes_after_the_sidecar() -> None:
    pod = over({"spec": {"initContainers": [{"name": "prepare", "image": "p:1"}]}})
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["sidecar", "prepare"]


def test_a_variable_gets_its_new_source_alone() -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    pod = over(with_server(env=[{"name": "HOME", "valueFrom": secret}, {"name": "B", "value": "2"}]))
    assert server(pod)["env"] == [
        {"name": "HOME", "valueFrom": secret},
        {"name": "KITESTRING_X", "value": "1"},
        {"name": "B", "value": "2"},
    ]


def test_a_scratch_volume_becomes_another_or_gets_another_size() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "fast"}}
    assert over({"spec": {"volumes": [{"name": "tmp", **claim}]}})["spec"]["volumes"][1] == {"name": "tmp", **claim}
    larger = over({"spec": {"volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]}})["spec"]["volumes"][1]
    assert larger == {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}}


def test_mounts_are_merged_by_path() -> None:
    pod = over(
        with_server(volumeMounts=[{"name": "fast", "mountPath": "/tmp"}, {"name": "data", "mountPath": "/data"}])
    )
    assert server(pod)["volumeMounts"] == [
        {"name": "config", "mountPath": "/etc/kitestring"},
        {"name": "fast", "mountPath": "/tmp"},
        {"name": "data", "mountPath": "/data"},
    ]


def test_other_lists_are_replaced() -> None:
    base = {"tolerations": [{"key": "a"}, {"key": "b"}]}
    assert merged(base, {"tolerations": [{"key": "c"}]}) == {"tolerations": [{"key": "c"}]}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (with_server(env=[{"name": "HOME", "$patch": "delete"}]), [{"name": "KITESTRING_X", "value": "1"}]),
        (
            with_server(env=[{"$patch": "replace"}, {"name": "KITESTRING_X", "value": "1"}, {"name": "B"}]),
            [{"name": "KITESTRING_X", "value": "1"}, {"name": "B"}],
        ),
        (with_server(env=[{"name": "ABSENT", "$patch": "delete"}]), BASE["spec"]["containers"][0]["env"]),
    ],
)
def test_directives_of_a_list_are_honoured(template: dict[str, Any], expected: list[Any]) -> None:
    assert server(over(template))["env"] == expected


@pytest.mark.parametrize(
    ("directive", "expected"),
    [
        ({"$patch": "replace", "runAsUser": 7}, {"runAsUser": 7}),
        ({"$patch": "merge", "runAsUser": 7}, {"runAsNonRoot": True, "runAsUser": 7}),
    ],
)
def test_directives_of_a_map_are_honoured(directive: dict[str, Any], expected: dict[str, Any]) -> None:
    assert over({"spec": {"securityContext": directive}})["spec"]["securityContext"] == expected


def test_a_map_may_be_deleted() -> None:
    assert "securityContext" not in over({"spec": {"securityContext": {"$patch": "delete"}}})["spec"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    (with_server(image="mine:1"), "spec.template.spec.containers[server].image: found 'mine:1'; Kitestring sets it;"),
    (with_server(command=["sh"]), "spec.containers[server].command"),
    (with_server(args=["--b"]), "spec.containers[server].args"),
    (with_server(readinessProbe={}), "spec.containers[server].readinessProbe"),
    (with_server(livenessProbe={}), "spec.containers[server].livenessProbe"),
    (with_server(lifecycle={}), "spec.containers[server].lifecycle"),
    (with_server(terminationMessagePath="/x"), "spec.containers[server].terminationMessagePath"),
    (with_server(env=[{"name": "KITESTRING_X", "value": "2"}]), "spec.containers[server].env[KITESTRING_X]"),
    (with_server(env=[{"name": "VLLM_SERVER_DEV_MODE", "value": "0"}]), "env[VLLM_SERVER_DEV_MODE]"),
    (with_server(volumeMounts=[{"name": "x", "mountPath": "/etc/kitestring/"}]), "volumeMounts[/etc/kitestring]"),
    (with_server(volumeMounts=[{"name": "x", "mountPath": "/etc/a/../kitestring-secrets/k"}]), "kitestring-secrets/k]"),
    (with_server(**{"$patch": "delete"}), "spec.containers[server]: found nothing; it is a part of Kitestring"),
    (with_server(env=None), "spec.containers[server].env[KITESTRING_X]: found another value or none"),
    (with_server(volumeMounts=[{"$patch": "replace"}]), "spec.containers[server].volumeMounts[/etc/kitestring]"),
    ({"spec": {"containers": None}}, "spec.containers[server]: found nothing"),
    ({"spec": {"initContainers": [{"name": "sidecar", "$patch": "delete"}]}}, "initContainers[sidecar]: found nothing"),
    ({"spec": {"volumes": None}}, "spec.volumes[config]: found another volume or none"),
    ({"spec": {"containers": [{"$patch": "replace"}]}}, "spec.containers[server]: found nothing"),
    ({"spec": {"volumes": [{"$patch": "replace"}]}}, "spec.volumes[config]: found another volume or none"),
    (
        {"spec": {"initContainers": [{"name": "sidecar", "restartPolicy": "Never"}]}},
        "initContainers[sidecar].restartPolicy",
    ),
    ({"spec": {"initContainers": [{"name": "server", "image": "x"}]}}, "initContainers[server]: found a container"),
    ({"spec": {"volumes": [{"name": "config", "emptyDir": {}}]}}, "spec.volumes[config]: found another volume or none"),
    ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy: found 'Always'"),
    ({"spec": {"hostname": "x"}}, "spec.hostname"),
    ({"spec": {"subdomain": "x"}}, "spec.subdomain"),
    ({"spec": {"activeDeadlineSeconds": 5}}, "spec.activeDeadlineSeconds"),
    ({"spec": {"terminationGracePeriodSeconds": "60"}}, "terminationGracePeriodSeconds: found '60'; an integer"),
    ({"spec": {"terminationGracePeriodSeconds": None}}, "terminationGracePeriodSeconds: found nothing"),
    ({"metadata": None}, "spec.template.metadata: found nothing; an object is needed"),
    ({"metadata": {"labels": None}}, "metadata.labels[kitestring.dev/run]: found nothing"),
    ({"spec": {"$retainKeys": ["a"]}}, "spec.$retainKeys: found a directive; of the directives only $patch"),
    ({"spec": {"securityContext": {"$patch": "destroy"}}}, "securityContext.$patch: found 'destroy'; allowed:"),
    ({"spec": {"containers": {}}}, "spec.containers[server]: found nothing"),
    ({"spec": {"containers": ["a"]}}, "spec.containers[0]: found 'a'; an object is needed"),
    ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0]: found no name"),
    (with_server(env=[{"value": "x"}]), "spec.containers[server].env[0]: found no name"),
    ({"spec": []}, "spec.template.spec: found []; an object is needed"),
    ({"containers": []}, "spec.template.containers: found a field; a pod template has metadata and spec"),
    ({"metadata": {"name": "x"}}, "metadata.name: found a field; allowed: labels, annotations"),
    ({"metadata": {"labels": {"kitestring.dev/run": "b"}}}, "metadata.labels[kitestring.dev/run]"),
    ({"metadata": {"labels": {"app.kubernetes.io/component": "b"}}}, "metadata.labels[app.kubernetes.io/component]"),
    (
        {"metadata": {"annotations": {"kitestring.dev/spec-hash": "b"}}},
        "metadata.annotations[kitestring.dev/spec-hash]",
    ),
]


@pytest.mark.parametrize(("template", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_what_is_ours_cannot_be_taken_away(template: dict[str, Any], message: str) -> None:
    with pytest.raises(OverlayRefusedError) as refused:
        over(template)
    (refusal,) = refused.value.refusals
    assert message in refusal.message
    assert refusal.field.startswith("spec.template.") and refusal.remedy


def test_labels_and_selectors_may_be_called_like_lists_of_the_api() -> None:
    pod = over({"metadata": {"labels": {"env": "prod", "ports": "x"}}, "spec": {"nodeSelector": {"volumes": "fast"}}})
    assert pod["metadata"]["labels"]["env"] == "prod" and pod["spec"]["nodeSelector"] == {"volumes": "fast"}


def test_what_says_the_same_as_ours_is_allowed() -> None:
    assert over(with_server(image="server:1", args=["--a"])) == BASE


def test_the_whole_pod_cannot_be_replaced() -> None:
    with pytest.raises(OverlayRefusedError) as refused:
        over({"spec": {"$patch": "replace"}})
    assert {"nothing", "another volume or none"} == {refusal.found for refusal in refused.value.refusals}


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(OverlayRefusedError) as refused:
        over({"spec": {"hostname": "x", "containers": [{"name": "server", "command": ["sh"], "image": "x"}]}})
    assert len(refused.value.refusals) == 3
    assert len(str(refused.value).splitlines()) == 3


_scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
_keys = st.sampled_from([*MERGE_KEYS, *MERGE_KEYS.values(), "$patch", "image", "command", "labels", "x"])
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4), max_leaves=12
)


@given(st.fixed_dictionaries({}, optional={"spec": st.dictionaries(_keys, _values, max_size=4), "metadata": _values}))
def test_any_template_is_merged_or_refused(template: dict[str, Any]) -> None:
    before = copy.deepcopy((BASE, template))
    try:
        pod = over(template)
    except OverlayRefusedError as refused:
        assert refused.refusals
    else:
        assert server(pod)["image"] == "server:1" and server(pod)["args"] == ["--a"]
        assert pod["metadata"]["labels"]["kitestring.dev/run"] == "a"
        assert BASE["spec"]["volumes"][0] in pod["spec"]["volumes"]
    assert (BASE, template) == before


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), _scalars.filter(lambda value: value is not None)))
def test_merging_twice_is_merging_once(fields: dict[str, Any]) -> None:
    template = {"spec": {"nodeSelector": fields, "containers": [{"name": "more", "x": fields}]}}
    once = over(template)
    assert merged(once, template) == once


def test_the_documentation_names_every_wall() -> None:
    text = (Path(__file__).parents[3] / "docs/pod-templates.md").read_text()
    walls = [*WALLS.container_fields, *WALLS.pod_fields, *WALLS.variables, *WALLS.mount_roots]
    assert [wall for wall in walls if f"`{wall}`" not in text] == []
