"""What every pod of a run may do, mount and reach: the walls of the design, read from the rendered objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kitestring_api import names
from kitestring_operator.observed import Manifest
from kitestring_operator.parts import run_objects
from tests.operator.parts.rendering import CASES, find, of_case

Pod = dict[str, Any]


def templates(objects: list[Manifest]) -> Iterator[tuple[str, Pod]]:
    """(component, PodTemplateSpec) of every object that makes pods."""
    for item in objects:
        if "template" in item.get("spec", {}):
            yield item["metadata"]["labels"][names.LABEL_COMPONENT], item["spec"]["template"]


def containers(pod: Pod) -> list[Pod]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def ours(case: str) -> Iterator[tuple[str, Pod, Pod]]:
    """(component, pod, container) of every container of ours."""
    for component, pod in templates(run_objects(of_case(case))):
        for container in containers(pod):
            if container["name"] != "metrics":
                yield component, pod, container


@pytest.mark.parametrize("case", CASES)
def test_pods_pass_the_restricted_standard(case: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    for component, pod, container in ours(case):
        spec = pod["spec"]
        assert not spec["automountServiceAccountToken"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container["securityContext"]
        assert not security["allowPrivilegeEscalation"] and security["readOnlyRootFilesystem"]
        assert security["capabilities"]["drop"] == ["ALL"]
        # the one that the case's template asks for
        assert set(security["capabilities"].get("add", [])) <= ({"IPC_LOCK"} if component == "trainer" else set())
        assert not {"hostPath"} & {source for volume in spec["volumes"] for source in volume}


@pytest.mark.parametrize("case", CASES)
def test_containers_ask_for_resources_and_can_write_where_they_must(case: str) -> None:
    for _, pod, container in ours(case):
        assert "cpu" in container["resources"]["requests"]
        assert {"memory", "nvidia.com/gpu"} & {*container["resources"]["requests"], *container["resources"]["limits"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= set(volumes)
        assert len(mounts) == len(container["volumeMounts"])
        assert "emptyDir" in volumes[mounts["/tmp"]] and "emptyDir" in volumes[mounts["/kitestring/home"]]


@pytest.mark.parametrize("case", CASES)
def test_no_volume_is_in_vain(case: str) -> None:
    for _, pod in templates(run_objects(of_case(case))):
        used = {mount["name"] for container in containers(pod) for mount in container.get("volumeMounts", [])}
        assert {volume["name"] for volume in pod["spec"]["volumes"]} == used


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods_of_their_part_alone(case: str) -> None:
    objects = run_objects(of_case(case))
    pods = [(component, pod["metadata"]["labels"]) for component, pod in templates(objects)]
    for item in objects:
        kind, spec = item["kind"], item.get("spec", {})
        if kind == "Service":
            selector = {k: v for k, v in spec["selector"].items() if not k.startswith("batch.kubernetes.io/")}
        elif kind in ("StatefulSet", "Deployment", "PodDisruptionBudget"):
            selector = spec["selector"]["matchLabels"]
        elif kind == "NetworkPolicy" and not item["metadata"]["name"].endswith("-deny"):
            selector = spec["podSelector"]["matchLabels"]
        else:
            continue
        found = {component for component, labels in pods if selector.items() <= labels.items()}
        assert found == {item["metadata"]["labels"][names.LABEL_COMPONENT]}, item["metadata"]["name"]


def secrets(pod: Pod, container: Pod) -> dict[str, set[str]]:
    """Secret → keys that the container gets, as files or as variables."""
    found: dict[str, set[str]] = {}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    for mount in container.get("volumeMounts", []):
        volume = volumes[mount["name"]]
        sources = [source["secret"] for source in volume.get("projected", {}).get("sources", [])]
        if "secret" in volume:
            sources.append({"name": volume["secret"]["secretName"], "items": volume["secret"]["items"]})
        for source in sources:
            found.setdefault(source["name"], set()).update(item["key"] for item in source["items"])
            assert mount["readOnly"]
    for variable in container["env"]:
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            found.setdefault(reference["name"], set()).add(reference["key"])
    return found


S3 = {"accessKeyId", "secretAccessKey"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "verl-cpu",
            {
                "trainer": {
                    "calculator-keys": {"queueCredential", "adminCredential"},
                    "calculator-storage": S3,
                },
                "gateway": {
                    "calculator-keys": {"tokenKey", "adminCredential", "collectorCredential", "agentCredential"}
                },
                "collector": {
                    "calculator-keys": {"collectorCredential", "agentCredential"},
                    "calculator-storage": S3,
                },
                "sidecar": {"calculator-keys": {"adminCredential"}, "calculator-storage": S3},
                "server": {},
            },
        ),
        (
            "vllm-gpu",
            {
                "fetch": {"runs-all": S3, "hf": {"token"}, "tasks-reader": S3},
                "trainer": {
                    "coder-keys": {"queueCredential", "adminCredential"},
                    "runs-all": S3,
                },
                "gateway": {"coder-keys": {"tokenKey", "adminCredential", "collectorCredential", "agentCredential"}},
                "collector": {"coder-keys": {"collectorCredential"}, "runs-traces": S3},
                "agent-collector": {"coder-keys": {"agentCredential"}, "runs-agent": S3},
                "sidecar": {"coder-keys": {"adminCredential"}, "runs-weights": S3},
                "server": {},
            },
        ),
        (
            "frozen-judge",
            {
                "trainer": {"support-keys": {"queueCredential", "adminCredential"}, "minio": S3},
                "gateway": {
                    "support-keys": {"tokenKey", "adminCredential", "collectorCredential", "agentCredential"},
                    "models": {"apiKey"},
                },
                "collector": {"support-keys": {"collectorCredential"}, "minio": S3},
                "agent-collector": {"support-keys": {"agentCredential"}, "minio": S3},
            },
        ),
    ],
)
def test_each_container_has_its_own_secrets_and_no_others(case: str, expected: dict[str, dict[str, set[str]]]) -> None:
    assert {container["name"]: secrets(pod, container) for _, pod, container in ours(case)} == expected


@pytest.mark.parametrize("case", CASES)
def test_each_pod_has_its_own_config_and_no_other(case: str) -> None:
    """That of the trainer holds what agents must not see."""
    expected = {
        "trainer": {"trainer.json", "fetch.json"},
        "gateway": {"gateway.json"},
        "collector": {"collector.json", "agent-collector.json"},
        "policy-server": {"policy-sidecar.json", "policy-server.json"},
    }
    for component, pod in templates(run_objects(of_case(case))):
        (config,) = [volume["configMap"] for volume in pod["spec"]["volumes"] if volume["name"] == "config"]
        files = {item["key"] for item in config["items"]}
        assert files and files <= expected[component]


def test_only_the_sidecar_listens_on_the_address_of_a_policy_server() -> None:
    for case in ("verl-cpu", "vllm-gpu"):
        for component, _, container in ours(case):
            if component == "policy-server":
                assert bool(container.get("ports")) == (container["name"] == "sidecar")


# --- Network ------------------------------------------------------------------------------------------------------


def reaches(objects: list[Manifest], client: str, server: str, port: int) -> bool:
    """Whether both policies, of the client's egress and of the server's ingress, let a connection pass."""
    policies = {
        item["spec"]["podSelector"]["matchLabels"].get(names.LABEL_COMPONENT): item["spec"]
        for item in objects
        if item["kind"] == "NetworkPolicy"
    }
    there = policies.get(client)
    opens = there is None or any(
        _is_of(entry.get("to"), server) and _has_port(entry, port) for entry in there["egress"] if "to" in entry
    )
    return opens and any(
        _is_of(entry["from"], client) and _has_port(entry, port) for entry in policies[server]["ingress"]
    )


def _is_of(peers: list[Any] | None, component: str) -> bool:
    return any(
        peer.get("podSelector", {}).get("matchLabels", {}).get(names.LABEL_COMPONENT) == component
        for peer in peers or []
    )


def _has_port(entry: dict[str, Any], port: int) -> bool:
    return "ports" not in entry or any(one["port"] == port for one in entry["ports"])


def test_parts_reach_each_other_as_the_design_says_and_not_otherwise() -> None:
    objects = run_objects(of_case("vllm-gpu"))
    ports = {"gateway": [8080, 8081], "policy-server": [8000, 8001], "collector": [4318, 4319], "trainer": [8090, 6379]}
    # the policies of the agents are the pool's: what is asked here is whom our parts let in
    clients = ("trainer", "gateway", "policy-server", "collector", "rollout", "operator")
    found = {
        (client, server, port)
        for client in clients
        for server, numbers in ports.items()
        for port in numbers
        if reaches(objects, client, server, port)
    }
    assert found == {
        ("rollout", "gateway", 8080),
        ("rollout", "trainer", 8090),
        ("operator", "trainer", 8090),
        ("trainer", "trainer", 8090),
        ("trainer", "trainer", 6379),
        ("trainer", "gateway", 8081),
        ("trainer", "policy-server", 8000),
        ("gateway", "policy-server", 8000),
        ("gateway", "collector", 4318),
        ("gateway", "collector", 4319),
    }


@pytest.mark.parametrize("case", CASES)
def test_what_no_policy_opens_is_closed(case: str) -> None:
    made = of_case(case)
    deny = find(run_objects(made), "NetworkPolicy", f"{made.name}-deny")["spec"]
    assert deny["podSelector"]["matchLabels"] == {names.LABEL_RUN: made.name}
    assert (deny["policyTypes"], deny["ingress"], deny["egress"]) == (["Ingress", "Egress"], [], [])


@pytest.mark.parametrize("case", CASES)
def test_names_in_pods_are_those_that_kubernetes_takes(case: str) -> None:
    """What the API server checks and no schema says: lengths and forms of names."""
    label = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
    service = re.compile(r"(?=.*[a-z])[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
    for _, pod in templates(run_objects(of_case(case))):
        found = containers(pod)
        ports = [port["name"] for container in found for port in container.get("ports", [])]
        assert all(service.fullmatch(name) and "--" not in name for name in ports) and len(ports) == len(set(ports))
        of_containers = [container["name"] for container in found]
        of_volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        for group in (of_containers, of_volumes):
            assert all(label.fullmatch(name) for name in group) and len(group) == len(set(group))
        for value in pod["metadata"]["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value)
        for container in found:
            for probe in ("startupProbe", "livenessProbe"):
                # the API server allows no other
                assert container.get(probe, {}).get("successThreshold", 1) == 1
            sidecar = container.get("restartPolicy") == "Always"
            assert (
                sidecar
                or container["name"] not in [one["name"] for one in pod["spec"].get("initContainers", [])]
                or ("readinessProbe" not in container)
            )
