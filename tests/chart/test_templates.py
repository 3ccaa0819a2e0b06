"""What the chart makes of its values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitestring_api import names
from kitestring_operator.cluster.kinds import KINDS, LISTED
from kitestring_operator.handlers import WATCHED
from kitestring_operator.parts.network import COMPONENT_OPERATOR
from kitestring_operator.probes import LIVE_ROUTES, READY_ROUTE
from kitestring_operator.settings import Settings, load_settings
from tests.chart.conftest import CHART, KUBE_VERSION, ROOT, Manifest, Render, of_kind

HERE = Path(__file__).parent
EVERYTHING = HERE / "everything.yaml"
SEAWEEDFS = ("seaweedfs.enabled=true", "seaweedfs.secretAccessKey=secret")
GOLDEN: dict[str, tuple[tuple[str, ...], Path | None]] = {
    "default": (("crds.install=false",), None),
    "seaweedfs": ((*SEAWEEDFS, "seaweedfs.persistence.size=10Gi", "crds.install=false"), None),
    "everything": ((), EVERYTHING),
}


def test_helm_finds_nothing_wrong(helm: Callable[..., Any]) -> None:
    for arguments in ([], [f"--values={EVERYTHING}"], [f"--set={','.join(SEAWEEDFS)}"]):
        done = helm("lint", "--strict", str(CHART), f"--kube-version={KUBE_VERSION}", *arguments)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", GOLDEN)
def test_the_rendered_objects_are_those_on_file(render_text: Callable[..., str], name: str) -> None:
    """UPDATE_GOLDEN=1 writes the files; read the difference before you commit it."""
    settings, values = GOLDEN[name]
    file = HERE / "golden" / f"{name}.yaml"
    text = render_text(*settings, values=values)
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


# --- operator.yaml ------------------------------------------------------------------------------------------------


def operator_yaml(objects: list[Manifest]) -> dict[str, Any]:
    (config,) = of_kind(objects, "ConfigMap")
    settings: dict[str, Any] = yaml.safe_load(config["data"]["operator.yaml"])
    return settings


def test_the_operator_understands_its_settings(render: Render) -> None:
    settings = Settings.model_validate(operator_yaml(render()))
    assert settings.images.policy_server_cpu == "kitestring/policy-server-cpu:0.1.0"
    assert settings.default_storage is None
    assert settings.leader_election.lease_name == "kitestring"
    assert settings.leader_election.namespace == "system"


def test_every_setting_arrives(render: Render) -> None:
    values = yaml.safe_load(EVERYTHING.read_text(encoding="utf-8"))
    settings = Settings.model_validate(operator_yaml(render(values=EVERYTHING))).model_dump(by_alias=True, mode="json")
    images = {name: values["images"][name] for name in settings["images"]}
    storage = {name: values["defaultStorage"][name] for name in ("bucket", "prefix", "endpoint", "region")}
    assert settings["images"] == images
    assert settings["imagePullPolicy"] == values["images"]["pullPolicy"]
    assert settings["defaultStorage"].items() >= storage.items()
    assert settings["namespaces"] == values["namespaces"]
    assert settings["defaultTemplates"]["trainer"] == values["settings"]["defaultTemplates"]["trainer"]
    for name in ("collectorKind", "clusterDomain", "jobCreationPerSecond", "pollSeconds", "resyncSeconds"):
        assert settings[name] == values["settings"][name]
    assert settings["leaderElection"] == {
        "enabled": True,
        "leaseName": "kitestring",
        "namespace": "system",
        "leaseSeconds": 9,
        "renewSeconds": 3.0,
    }


def test_the_keys_of_the_default_storage_are_files_of_its_secret(render: Render, tmp_path: Path) -> None:
    objects = render(*SEAWEEDFS)
    text = of_kind(objects, "ConfigMap")[0]["data"]["operator.yaml"]
    (secret,) = of_kind(objects, "Secret")
    pod = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]
    mount = next(item for item in pod["containers"][0]["volumeMounts"] if item["name"] == "storage-keys")
    volume = next(item for item in pod["volumes"] if item["name"] == "storage-keys")
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    for key, value in secret["stringData"].items():
        (tmp_path / key).write_text(value)
    (tmp_path / "operator.yaml").write_text(text.replace(mount["mountPath"], str(tmp_path)))
    settings = load_settings(tmp_path / "operator.yaml")
    assert settings.storage_keys and settings.storage_keys.secret_access_key.get_secret_value() == "secret"
    assert settings.default_storage and settings.default_storage.endpoint
    (service,) = (item for item in of_kind(objects, "Service") if "seaweedfs" in item["metadata"]["name"])
    port = service["spec"]["ports"][0]["port"]
    assert settings.default_storage.endpoint == f"http://{service['metadata']['name']}.system.svc:{port}"


def test_an_existing_secret_is_used_as_it_is(render: Render) -> None:
    objects = render("defaultStorage.bucket=runs", "defaultStorage.existingSecret=keys")
    volumes = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["volumes"]
    assert not of_kind(objects, "Secret")
    assert [volume["secret"]["secretName"] for volume in volumes if "secret" in volume] == ["keys"]


def test_changed_settings_and_keys_start_new_pods(render: Render) -> None:
    def pod(kind: str, *settings: str) -> Manifest:
        template: Manifest = of_kind(render(*settings), kind)[0]["spec"]["template"]
        return template

    assert pod("Deployment", "settings.pollSeconds=3") != pod("Deployment")
    own = "defaultStorage.bucket=runs,defaultStorage.accessKeyId=a,defaultStorage.secretAccessKey="
    assert pod("Deployment", own + "one") != pod("Deployment", own + "two")
    for kind in ("Deployment", "StatefulSet"):
        assert pod(kind, *SEAWEEDFS) != pod(kind, SEAWEEDFS[0], "seaweedfs.secretAccessKey=other")
    assert pod("StatefulSet", *SEAWEEDFS) == pod("StatefulSet", *SEAWEEDFS, "settings.pollSeconds=3,replicas=1"), (
        "its volume may go with its pod"
    )


def test_the_keys_of_seaweedfs_stay_when_the_release_goes(render: Render) -> None:
    """What goes on has them. Keys that the values give to a storage of others go with the release."""
    (secret,) = of_kind(render(*SEAWEEDFS), "Secret")
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    (secret,) = of_kind(render(values=EVERYTHING), "Secret")
    assert "annotations" not in secret["metadata"]


# --- definitions --------------------------------------------------------------------------------------------------


def test_the_definitions_are_those_of_the_api_and_stay(render: Render) -> None:
    written = {}
    for path in (ROOT / "crds/manifests").glob("*.yaml"):
        definition = yaml.safe_load(path.read_text(encoding="utf-8"))
        definition["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
        written[definition["metadata"]["name"]] = definition
    rendered = {item["metadata"]["name"]: item for item in of_kind(render(), "CustomResourceDefinition")}
    assert rendered == written
    assert not of_kind(render("crds.install=false"), "CustomResourceDefinition")


# --- rights -------------------------------------------------------------------------------------------------------

Right = tuple[str, str, str]
"""API group, resource, verb."""


def documented_rights(where: str) -> set[Right]:
    """From the table in docs/installation.md."""
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    table = page.split("<!-- rights -->")[1].split("<!-- end of rights -->")[0]
    rights: set[Right] = set()
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == where:
            group = re.search(r"\(([^)]+)\)$", cells[1])
            resources = re.findall(r"`([^`]+)`", cells[1])
            rights |= {(group[1] if group else "", resource, cells[2].strip("`")) for resource in resources}
            assert cells[3], f"{line}: no reason"
    return rights


def granted(role: Manifest) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_operator_may_do_what_the_table_says_and_nothing_else(render: Render) -> None:
    objects = render()
    roles = {item["metadata"]["name"]: item for item in of_kind(objects, "ClusterRole")}
    bound = {item["roleRef"]["name"] for item in of_kind(objects, "ClusterRoleBinding")}
    assert bound == {"kitestring", "kitestring-cluster"}
    assert granted(roles["kitestring"]) == documented_rights("served")
    assert granted(roles["kitestring-cluster"]) == documented_rights("cluster")
    (own,) = of_kind(objects, "Role")
    assert granted(own) == documented_rights("own")
    by_verb = {verb: rule.get("resourceNames") for rule in own["rules"] for verb in rule["verbs"]}
    assert by_verb == {"create": None, "get": ["kitestring"], "update": ["kitestring"]}, "the Lease of no other"
    assert "*" not in str([roles[name]["rules"] for name in bound]) + str(own["rules"])


def test_the_operator_may_list_and_watch_what_it_lists_and_watches_and_nothing_else() -> None:
    resources = {names.KIND_TRAINING_RUN, names.KIND_ROLLOUT_POOL}
    for verb, kinds in (
        ("watch", {*resources, *WATCHED, "Workload"}),
        # events of one object, where it lacks pods
        ("list", {*resources, *WATCHED, *LISTED, "Workload", "Event"}),
    ):
        granted_of = {
            (group, resource) for group, resource, granted_verb in documented_rights("served") if granted_verb == verb
        }
        assert granted_of == {(KINDS[kind].group, KINDS[kind].plural) for kind in kinds}


def test_with_namespaces_nothing_is_granted_elsewhere(render: Render) -> None:
    objects = render("namespaces={a,b}")
    (everywhere,) = of_kind(objects, "ClusterRoleBinding")
    assert everywhere["roleRef"]["name"] == "kitestring-cluster", "reads what lies in no namespace"
    roles = {(item["metadata"]["namespace"], item["metadata"]["name"]): item for item in of_kind(objects, "Role")}
    assert set(roles) == {("a", "kitestring"), ("b", "kitestring"), ("system", "kitestring-own")}
    assert granted(roles["a", "kitestring"]) == granted(roles["b", "kitestring"]) == documented_rights("served")
    for binding in of_kind(objects, "RoleBinding"):
        assert (binding["metadata"]["namespace"], binding["roleRef"]["name"]) in roles
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "kitestring", "namespace": "system"}]


@pytest.mark.parametrize("aggregate", [True, False])
def test_people_get_their_rights_through_the_clusters_roles(render: Render, aggregate: bool) -> None:
    roles = {
        item["metadata"]["name"]: item
        for item in of_kind(render(f"rbac.aggregate={str(aggregate).lower()}"), "ClusterRole")
    }
    for name, label in (("kitestring-viewer", "view"), ("kitestring-editor", "edit"), ("kitestring-editor", "admin")):
        found = f"rbac.authorization.k8s.io/aggregate-to-{label}" in roles[name]["metadata"]["labels"]
        assert found is aggregate
    writes = {verb for _, _, verb in granted(roles["kitestring-viewer"])} - {"get", "list", "watch"}
    assert not writes
    assert not {r for r in granted(roles["kitestring-editor"]) if r[1].endswith("/status") and r[2] != "get"}


# --- pods ---------------------------------------------------------------------------------------------------------


def pod_specs(objects: list[Manifest]) -> dict[str, dict[str, Any]]:
    specs = {}
    for item in objects:
        if item["kind"] == "Pod":
            specs[item["metadata"]["name"]] = item["spec"]
        elif "template" in item.get("spec", {}):
            specs[item["metadata"]["name"]] = item["spec"]["template"]["spec"]
    return specs


def test_every_pod_is_restricted(render: Render) -> None:
    """Pod Security Standards, restricted; and a read-only root, no token but the operator's, requests."""
    specs = pod_specs(render(*SEAWEEDFS))
    assert set(specs) == {"kitestring", "kitestring-seaweedfs", "kitestring-test"}
    for name, spec in specs.items():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is (name == "kitestring")
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


def test_every_pod_opens_the_registry(render: Render) -> None:
    specs = pod_specs(render(*SEAWEEDFS, "images.pullSecrets={one,two}"))
    assert set(specs) == {"kitestring", "kitestring-seaweedfs", "kitestring-test"}
    assert all(spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}] for spec in specs.values())


def test_the_operators_port_and_environment_have_the_names_of_the_api(render: Render) -> None:
    objects = render()
    (container,) = pod_specs(objects)["kitestring"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [names.PORT_OPERATOR]
    assert of_kind(objects, "Service")[0]["spec"]["ports"][0]["port"] == names.PORT_OPERATOR
    assert names.ENV_LOG_LEVEL in {variable["name"] for variable in container["env"]}
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes["readiness"] == READY_ROUTE
    assert {probes["startup"], probes["liveness"]} <= set(LIVE_ROUTES)


def test_runs_let_the_operator_in(render: Render) -> None:
    """The NetworkPolicy of a trainer names the operator's pods by these labels."""
    labels = of_kind(render(), "Deployment")[0]["spec"]["template"]["metadata"]["labels"]
    assert labels[names.LABEL_APP] == names.LABEL_APP_VALUE
    assert labels[names.LABEL_COMPONENT] == COMPONENT_OPERATOR


def test_selectors_find_the_pods_and_no_others(render: Render) -> None:
    objects = render(*SEAWEEDFS, "networkPolicy.enabled=true", "metrics.serviceMonitor.enabled=true")
    labels = {
        item["metadata"]["name"]: item["spec"]["template"]["metadata"]["labels"]
        for item in objects
        if "template" in item.get("spec", {})
    }
    selectors = [
        (item["metadata"]["name"], selector.get("matchLabels", selector))
        for item in objects
        for selector in [item.get("spec", {}).get("selector") or item.get("spec", {}).get("podSelector")]
        if selector and item["kind"] != "ServiceMonitor"
    ]
    assert len(selectors) == 7
    for name, selector in selectors:
        assert {owner for owner, found in labels.items() if found.items() >= selector.items()} == {name}
    (monitor,) = of_kind(objects, "ServiceMonitor")
    services = [
        item
        for item in of_kind(objects, "Service")
        if item["metadata"]["labels"].items() >= monitor["spec"]["selector"]["matchLabels"].items()
    ]
    assert [item["metadata"]["name"] for item in services] == ["kitestring"]


def test_a_single_operator_may_be_evicted(render: Render) -> None:
    assert of_kind(render(), "PodDisruptionBudget")
    assert not of_kind(render("replicas=1"), "PodDisruptionBudget")


def test_only_the_s3_port_of_seaweedfs_is_open(render: Render) -> None:
    (policy,) = of_kind(render(*SEAWEEDFS), "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"ports": [{"port": 8333, "protocol": "TCP"}]}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_a_secret_key_is_drawn_where_none_is_given(render: Render) -> None:
    (secret,) = of_kind(render("seaweedfs.enabled=true"), "Secret")
    assert re.fullmatch(r"[A-Za-z0-9]{40}", secret["stringData"]["secretAccessKey"])


def test_every_object_names_its_namespace(render: Render) -> None:
    """`kubectl apply -f` of the rendered file puts nothing anywhere else."""
    for values, settings in ((None, SEAWEEDFS), (EVERYTHING, ())):
        for item in render(*settings, values=values):
            if not item["kind"].startswith("Cluster") and item["kind"] != "CustomResourceDefinition":
                assert item["metadata"].get("namespace") in {"system", "team-a", "team-b"}, item["metadata"]
