"""What holds an agent in its pod, and what of it a template may take down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kitestring_api.v1alpha1.pod_template import WORKER_USER
from kitestring_operator.observed import Manifest
from kitestring_operator.overlay import OverlayRefusedError
from kitestring_operator.settings import DefaultTemplates
from tests.operator.parts.rendering import SETTINGS
from tests.operator.rollouts.rendering import CASES, container_of, context, objects_of, of_case, pod_of, pool_of

OURS = ("launcher", "worker")


def _pod(template_spec: dict[str, Any], agent: dict[str, Any] | None = None) -> Manifest:
    """The pod of a template with these fields."""
    pool = pool_of("worker")
    spec = pool["spec"]["template"]["spec"]
    spec["containers"][0] |= agent or {}
    spec |= template_spec
    return pod_of(context(pool))


@pytest.mark.parametrize("case", CASES)
def test_config_and_credential_are_the_workers_alone(case: str) -> None:
    spec = pod_of(of_case(case))
    guarded = {one["name"] for one in spec["volumes"] if one["name"] in ("kitestring-config", "kitestring-keys")}
    assert len(guarded) == 2
    for one in (*spec["initContainers"], *spec["containers"]):
        mounted = {mount["name"] for mount in one.get("volumeMounts") or ()}
        assert bool(mounted & guarded) == (one["name"] == "worker"), one["name"]


@pytest.mark.parametrize("case", CASES)
def test_of_the_runs_secrets_a_pod_has_the_queues_credential_only(case: str) -> None:
    spec = pod_of(of_case(case))
    secrets = [one["secret"] for one in spec["volumes"] if "secret" in one]
    keys = {item["key"] for secret in secrets for item in secret["items"]}
    assert keys <= {"queueCredential", "worker.json"}
    maps = [one["configMap"] for one in spec["volumes"] if "configMap" in one]
    assert all([item["key"] for item in one["items"]] == ["worker.json"] for one in maps)


@pytest.mark.parametrize("case", CASES)
def test_the_agent_cannot_write_launcher_or_socket(case: str) -> None:
    agent = container_of(pod_of(of_case(case)), "agent")
    mounts = {one["mountPath"]: one for one in agent["volumeMounts"]}
    assert mounts["/kitestring/bin"]["readOnly"] is True
    assert mounts["/kitestring/socket"]["readOnly"] is True
    assert {"/tmp", "/kitestring/scratch"} <= mounts.keys()
    assert agent["command"][0] == "/kitestring/bin/launcher"
    assert "args" not in agent


@pytest.mark.parametrize("case", CASES)
def test_worker_and_agent_are_different_users(case: str) -> None:
    spec = pod_of(of_case(case))
    for name in OURS:
        security = container_of(spec, name)["securityContext"]
        assert security["runAsUser"] == WORKER_USER
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    theirs = [one for one in (*spec["initContainers"], *spec["containers"]) if one["name"] not in OURS]
    for one in theirs:
        assert one["securityContext"].get("runAsUser", spec["securityContext"]["runAsUser"]) != WORKER_USER
    assert "shareProcessNamespace" not in spec


def test_the_walls_of_a_template_that_says_nothing() -> None:
    spec = pod_of(of_case("worker"))
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container_of(spec, "agent")["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


@pytest.mark.parametrize("case", CASES)
def test_nothing_hidden_is_in_the_pod(case: str) -> None:
    pool = pool_of(case)
    pool["spec"]["reward"] = {"source": "builtin", "builtin": {"kind": "regex", "pattern": "the-hidden-answer"}}
    assert "the-hidden-answer" not in json.dumps(objects_of(context(pool)))


def test_root_is_word_enough() -> None:
    of_pod = _pod({"securityContext": {"runAsUser": 0}})
    assert of_pod["securityContext"]["runAsNonRoot"] is False
    of_agent = _pod({}, {"securityContext": {"runAsUser": 0}})
    assert of_agent["securityContext"]["runAsNonRoot"] is True
    assert container_of(of_agent, "agent")["securityContext"]["runAsNonRoot"] is False


def test_the_own_word_on_root_counts() -> None:
    spec = _pod({"securityContext": {"runAsUser": 0, "runAsNonRoot": True}})
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_other_containers_have_the_same_walls_by_default() -> None:
    security = container_of(pod_of(of_case("loosened")), "proxy")["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_ours_start_after_what_the_user_prepares() -> None:
    spec = pod_of(of_case("loosened"))
    assert [one["name"] for one in spec["initContainers"]] == ["data", "database", "launcher", "worker"]
    assert [one["name"] for one in spec["containers"]] == ["agent", "proxy"]


def test_what_is_the_users_stays() -> None:
    spec = pod_of(of_case("loosened"))
    template = pool_of("loosened")["spec"]["template"]["spec"]
    for field in ("runtimeClassName", "serviceAccountName", "nodeSelector", "tolerations", "imagePullSecrets"):
        assert spec[field] == template[field]
    assert [volume for volume in spec["volumes"] if not volume["name"].startswith("kitestring-")] == template["volumes"]
    agent, wanted = container_of(spec, "agent"), template["containers"][0]
    assert (agent["env"], agent["image"], agent["workingDir"]) == (wanted["env"], wanted["image"], wanted["workingDir"])
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in agent["volumeMounts"]


def test_a_mount_of_the_template_takes_the_place_of_ours() -> None:
    spec = pod_of(of_case("loosened"))
    at = {one["mountPath"]: one["name"] for one in container_of(spec, "agent")["volumeMounts"]}
    assert at["/tmp"] == "large"
    moved = _pod(
        {"volumes": [{"name": "mine", "emptyDir": {}}]},
        {
            "volumeMounts": [
                {"name": "mine", "mountPath": "/kitestring/scratch/"},
                {"name": "mine", "mountPath": "/kitestring/socket"},
            ]
        },
    )
    agent = container_of(moved, "agent")
    at = {one["mountPath"].rstrip("/"): one["name"] for one in agent["volumeMounts"]}
    assert len(at) == len(agent["volumeMounts"])
    assert at["/kitestring/scratch"] == "mine"
    assert at["/kitestring/socket"] == "kitestring-socket"


def test_requests_of_ours_stand_where_the_template_says_nothing_of_a_kind() -> None:
    assert container_of(_pod({}), "agent")["resources"] == {"requests": {"cpu": "250m", "memory": "256Mi"}}
    said = {"limits": {"cpu": "2"}, "claims": [{"name": "gpu"}]}
    assert container_of(_pod({}, {"resources": said}), "agent")["resources"] == {
        "requests": {"memory": "256Mi"},
        "limits": {"cpu": "2"},
        "claims": [{"name": "gpu"}],
    }


def test_the_installations_template_lies_below_the_pools() -> None:
    below = {
        "metadata": {"annotations": {"by": "installation"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "agents"},
            "containers": [{"name": "agent", "env": [{"name": "HTTP_PROXY", "value": "http://proxy:3128"}]}],
            "terminationGracePeriodSeconds": 1,
        },
    }
    settings = SETTINGS.model_copy(update={"default_templates": DefaultTemplates(rollout=below)})
    pool = pool_of("worker")
    pool["spec"]["template"]["spec"]["nodeSelector"] = {"pool": "mine"}
    spec = pod_of(context(pool, settings=settings))
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "mine"}
    assert container_of(spec, "agent")["env"] == [{"name": "HTTP_PROXY", "value": "http://proxy:3128"}]
    # the worker was told how long it may drain
    assert spec["terminationGracePeriodSeconds"] == 90


def test_the_installations_template_cannot_take_ours_away() -> None:
    below = {"spec": {"initContainers": [{"name": "worker", "image": "other"}]}}
    settings = SETTINGS.model_copy(update={"default_templates": DefaultTemplates(rollout=below)})
    with pytest.raises(OverlayRefusedError, match=r"settings\.defaultTemplates\.rollout.*worker.*image"):
        pod_of(context(pool_of("worker"), settings=settings))


def test_labels_of_ours_are_not_the_templates() -> None:
    pool = pool_of("worker")
    pool["spec"]["template"]["metadata"] = {"labels": {"kitestring.dev/run": "other", "team": "a"}}
    labels = objects_of(context(pool))[-1]["spec"]["template"]["metadata"]["labels"]
    assert (labels["kitestring.dev/run"], labels["team"]) == ("sums", "a")
