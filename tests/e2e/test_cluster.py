"""Which cluster the end-to-end tests take, and which images: decided here, with nothing started."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.harness import images as harness_images
from e2e.harness.release import of_others
from e2e.node import __main__ as cluster
from e2e.node import engine, images, kind, kube, layout, network, programs
from e2e.node.command import Failed

OWN_NODE_IMAGE = "kitestring-e2e/node:0123456789ab"


def refused(name: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"{name} is called")

    return refuse


def refuse(patch: pytest.MonkeyPatch, module: object, *functions: str) -> None:
    for name in functions:
        patch.setattr(module, name, refused(name))


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "E2E_IMAGE_PREFIX", "E2E_IMAGE_TAG"):
        monkeypatch.delenv(name, raising=False)


# --- KUBECONFIG ---


def test_without_kubeconfig_the_cluster_is_made_here() -> None:
    assert kube.external_kubeconfig() is None
    assert kube.kubeconfig() == layout.KUBECONFIG


def test_kubeconfig_of_the_cluster_made_here_is_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`e2e/cluster env` sets it for a shell."""
    monkeypatch.setattr(layout, "KUBECONFIG", tmp_path / "run" / "kubeconfig")
    layout.KUBECONFIG.parent.mkdir()
    layout.KUBECONFIG.touch()
    (tmp_path / "link").symlink_to(layout.KUBECONFIG)
    for named in (layout.KUBECONFIG, tmp_path / "link"):
        monkeypatch.setenv("KUBECONFIG", str(named))
        assert kube.external_kubeconfig() is None
        assert kube.kubeconfig() == layout.KUBECONFIG


def test_kubeconfig_names_a_cluster_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "theirs"))
    assert kube.kubeconfig() == kube.external_kubeconfig() == tmp_path / "theirs"


@pytest.mark.parametrize("answers", [True, False])
def test_a_cluster_of_the_user_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "theirs"))
    monkeypatch.setattr(layout, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(kube, "reachable", lambda: answers)
    refuse(monkeypatch, engine, "start", "stop")
    refuse(monkeypatch, kind, "up", "down")
    refuse(monkeypatch, cluster.kwok, "end")
    refuse(monkeypatch, cluster.smoke, "check")
    monkeypatch.setattr("sys.argv", ["e2e/cluster", "up"])
    assert cluster.main() == (0 if answers else 1)
    if not answers:
        said = capsys.readouterr().err
        assert f"KUBECONFIG={tmp_path / 'theirs'} does not answer: start it, or unset KUBECONFIG" in said
    monkeypatch.setattr("sys.argv", ["e2e/cluster", "down"])
    assert cluster.main() == 0


# --- Images ---


def test_images_of_a_cluster_of_the_user_are_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "theirs")
    monkeypatch.setenv("E2E_IMAGE_PREFIX", "registry.example.com/team/")
    monkeypatch.setenv("E2E_IMAGE_TAG", "7")
    refuse(monkeypatch, harness_images, "call", "build", "image_exists", "remove_other_tags")
    refuse(monkeypatch, kind, "load", "unload", "name")
    found = harness_images.provide()
    named = {found.operator, found.rollout, found.trainer, found.policy_server, found.agent, found.static}
    parts = ("operator", "rollout", "trainer", "policy-server-cpu", "calculator-agent", "static-agent")
    assert named == {f"registry.example.com/team/{part}:7" for part in parts}
    assert found.mounted == (), "nothing of this machine is on its nodes"


@pytest.mark.parametrize("given", [[], ["E2E_IMAGE_PREFIX"], ["E2E_IMAGE_TAG"]])
def test_a_cluster_of_the_user_needs_both_names(monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    monkeypatch.setenv("KUBECONFIG", "theirs")
    for name in given:
        monkeypatch.setenv(name, "some")
    with pytest.raises(Failed, match="name images that it can pull in E2E_IMAGE_PREFIX and E2E_IMAGE_TAG"):
        harness_images.provide()


# --- Network ---


def test_every_node_is_wired_however_late_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {
            "metadata": {"name": f"node-{number}"},
            "spec": {"podCIDR": f"10.244.{number}.0/24"},
            "status": {"addresses": [{"type": "InternalIP", "address": f"172.18.0.{number}"}]},
        }
        for number in range(3)
    ]
    looks = iter([nodes[:2], [*nodes[:2], {**nodes[2], "spec": {}}], nodes])
    wired: list[str] = []

    def kubectl(*arguments: object) -> str:
        return json.dumps({"items": next(looks)}) if arguments[0] == "get" else ""

    monkeypatch.setattr(network, "kubectl", kubectl)
    monkeypatch.setattr(network, "docker", lambda *arguments, stdin: wired.append(arguments[2]))
    monkeypatch.setattr("time.sleep", lambda _: None)
    network.install(3)
    assert wired == ["node-0", "node-1", "node-2"]


# --- Programs ---


@pytest.mark.parametrize("name", ["kubectl", "helm"])
def test_programs_are_those_of_the_cluster_else_those_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    path = {"go": "/usr/bin/go"}
    monkeypatch.setattr("shutil.which", path.get)
    monkeypatch.setattr(programs, "folder_of", lambda group: tmp_path)
    with pytest.raises(Failed, match=f"{name} is not on the path: install it, or let `make e2e-up` build"):
        kube.binary(name)
    path[name] = f"/usr/bin/{name}"
    assert kube.binary(name) == Path(f"/usr/bin/{name}")
    (tmp_path / name).touch()
    assert kube.binary(name) == tmp_path / name


@pytest.mark.parametrize(
    ("release", "others"),
    [("kitestring-e2e", []), ("kitestring", ["trainingruns.kitestring.dev"]), (None, ["trainingruns.kitestring.dev"])],
)
def test_another_installation_is_told_by_its_definitions(release: str | None, others: list[str]) -> None:
    annotations = {"annotations": {"meta.helm.sh/release-name": release}} if release else {}
    foreign = {"metadata": {"name": "queues.example.com"}}
    assert of_others([]) == of_others([foreign]) == []
    assert of_others([foreign, {"metadata": {"name": "trainingruns.kitestring.dev", **annotations}}]) == others


# --- kind, with or without images to pull ---


@dataclass
class Machine:
    """What `kind.up` would have done, in its order."""

    can_pull: bool = True
    reachable: bool = False
    done: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def note(self, what: str, returned: object = None) -> Any:
        def act(*_: object, **__: object) -> object:
            self.done.append(what)
            return returned

        return act

    def succeeds(self, command: list[str], **_: object) -> bool:
        return self.can_pull and command[:2] == ["docker", "pull"]

    def kind(self, *arguments: str, stdin: str | None = None, log: str | None = None) -> str:
        match arguments:
            case ("create", "cluster", "--image", image, *_):
                assert stdin is not None
                self.config = yaml.safe_load(stdin)
                self.done.append(f"create of {image}")
            case ("delete", *_):
                self.done.append("delete")
            case ("get", "clusters"):
                return layout.CLUSTER if self.reachable else ""
        return ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine()
    for name in ("SHARED", "KUBECONFIG", "TOOLS"):
        monkeypatch.setattr(layout, name, tmp_path / name.lower())
    monkeypatch.setattr(kind, "_MADE_OF", tmp_path / "made-of")
    monkeypatch.setattr(kind, "succeeds", machine.succeeds)
    monkeypatch.setattr(kind, "_kind", machine.kind)
    monkeypatch.setattr(kind, "kubectl", lambda *_, **__: "")
    monkeypatch.setattr(kind, "reachable", lambda: machine.reachable)
    monkeypatch.setattr(kind, "load", lambda names: machine.done.append(f"load {' '.join(names)}"))
    monkeypatch.setattr(kind, "_link_tools", machine.note("link tools"))
    monkeypatch.setattr(images, "published_base_image", machine.note("base image of the registry"))
    monkeypatch.setattr(images, "base_image", machine.note("base image of packages"))
    monkeypatch.setattr(images, "node_image", machine.note("node image of modules", OWN_NODE_IMAGE))
    monkeypatch.setattr(programs, "build_all", lambda groups: None)
    monkeypatch.setattr(network, "install", machine.note("network"))
    return machine


def test_the_published_node_is_taken_where_it_can_be_pulled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, programs, "build", "build_all")
    kind.up()
    assert machine.done == [
        "base image of the registry",
        f"create of {kind._PUBLISHED_IMAGE}",
        f"load {layout.BASE_IMAGE}",
    ]
    assert "disableDefaultCNI" not in machine.config["networking"]


def test_the_node_is_built_where_nothing_can_be_pulled(machine: Machine) -> None:
    machine.can_pull = False
    kind.up()
    assert machine.done == [
        "base image of packages",
        "node image of modules",
        f"create of {OWN_NODE_IMAGE}",
        "network",
        "link tools",
    ]
    assert machine.config["networking"]["disableDefaultCNI"] is True


def test_a_node_has_the_checkout_and_its_environment(machine: Machine) -> None:
    kind.up()
    assert len(machine.config["nodes"]) == 3
    for node in machine.config["nodes"]:
        mounts = {mount["hostPath"]: mount for mount in node["extraMounts"]}
        assert all(mount["containerPath"] == path for path, mount in mounts.items())
        assert mounts[str(layout.REPOSITORY)]["readOnly"] is True
        assert mounts[str(layout.SHARED)]["readOnly"] is False


def test_a_cluster_that_is_there_is_kept_until_it_would_be_made_of_something_else(machine: Machine) -> None:
    kind.up()
    machine.reachable = True
    machine.done.clear()
    kind.up()
    assert machine.done == ["base image of the registry"]
    machine.can_pull = False
    kind.up()
    assert machine.done[-4:] == ["delete", f"create of {OWN_NODE_IMAGE}", "network", "link tools"]


def test_a_cluster_that_does_not_answer_is_made_anew(machine: Machine) -> None:
    kind.up()
    machine.done.clear()
    kind.up()
    assert f"create of {kind._PUBLISHED_IMAGE}" in machine.done


def test_an_engine_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "answers", lambda: True)
    refuse(monkeypatch, engine, "_install", "run")
    engine.start()


def test_only_root_starts_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "answers", lambda: False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    refuse(monkeypatch, engine, "_install", "run")
    with pytest.raises(Failed, match="start Docker, or set KUBECONFIG to a cluster"):
        engine.start()


# --- Images of the workers ---


@dataclass
class Workers:
    """Two workers' containerd, as far as names of images go: name → digest."""

    images: dict[str, str]
    called: list[list[str]] = field(default_factory=list)

    def docker(self, *arguments: str) -> str:
        command = list(arguments[arguments.index("images") + 1 :])
        if command == ["ls"]:
            rows = [f"{name} application/vnd… {digest} 1 MiB linux/amd64 -" for name, digest in self.images.items()]
            return "\n".join(["REF TYPE DIGEST SIZE PLATFORMS LABELS", *rows])
        self.called.append([arguments[1], *command])
        return ""


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    found = Workers(
        {
            "docker.io/kitestring-e2e/rollout:old": "sha256:aa",
            "sha256:c0aa": "sha256:aa",
            "docker.io/kitestring-e2e/calculator-agent:old": "sha256:bb",
            "docker.io/kitestring/calculator-agent:0.1.0": "sha256:bb",
            "sha256:c0bb": "sha256:bb",
        }
    )
    monkeypatch.setattr(kind, "_workers", lambda: ["worker", "worker2"])
    monkeypatch.setattr(kind, "docker", found.docker)
    return found


def test_an_image_goes_with_its_last_name(workers: Workers) -> None:
    kind.unload(["kitestring-e2e/rollout:old", "kitestring-e2e/calculator-agent:old", "kitestring-e2e/operator:old"])
    gone = ["docker.io/kitestring-e2e/calculator-agent:old", "docker.io/kitestring-e2e/rollout:old", "sha256:c0aa"]
    assert workers.called == [[node, "rm", *gone] for node in ("worker", "worker2")]


def test_nothing_is_asked_where_nothing_is_to_go(workers: Workers) -> None:
    kind.unload([])
    kind.unload(["kitestring-e2e/operator:old"])
    assert workers.called == []


def test_a_second_name_is_taken_from_whatever_had_it(workers: Workers) -> None:
    kind.name("kitestring-e2e/calculator-agent:new", "kitestring/calculator-agent:0.1.0")
    tag = ["tag", "--force", "docker.io/kitestring-e2e/calculator-agent:new"]
    assert workers.called == [
        [node, *tag, "docker.io/kitestring/calculator-agent:0.1.0"] for node in ("worker", "worker2")
    ]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("agent:1", "docker.io/library/agent:1"),
        ("kitestring/agent:0.1.0", "docker.io/kitestring/agent:0.1.0"),
        ("ghcr.io/kitestring/agent:1", "ghcr.io/kitestring/agent:1"),
        ("localhost/agent:1", "localhost/agent:1"),
        ("registry:5000/agent:1", "registry:5000/agent:1"),
    ],
)
def test_names_of_images_as_the_node_knows_them(name: str, whole: str) -> None:
    assert kind._reference(name) == whole


def test_the_agent_gets_the_name_that_the_example_has() -> None:
    example = layout.REPOSITORY / "examples" / "calculator" / "trainingrun.yaml"
    assert f"image: {harness_images._name_in_example()}\n" in example.read_text()
