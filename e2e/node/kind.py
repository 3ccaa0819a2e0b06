"""The kind cluster itself: made from `e2e/kind.yaml` with mounts, found again, deleted, given images."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.node import images, layout, network, programs
from e2e.node.command import digest, run, succeeds
from e2e.node.engine import docker, environment
from e2e.node.kube import kubectl, reachable
from e2e.node.progress import say, step

_MADE_OF: Final = layout.RUN / "made-of"
_CTR: Final = ("ctr", "--namespace=k8s.io")
_PUBLISHED_IMAGE: Final = os.environ.get(
    "E2E_NODE_IMAGE",
    "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5",
)
"""The node image that kind v0.33.0 takes by itself."""


def up() -> None:
    """Have the cluster: kept when it runs and is made of what it would be made of now, else made anew."""
    if _can_pull():
        images.published_base_image()
        _have(_PUBLISHED_IMAGE, published=True)
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        # Compiling takes both cores for minutes: it goes on while packages are fetched and unpacked.
        compiling = pool.submit(programs.build_all, (programs.KIND, programs.OWN, programs.CLUSTER))
        images.base_image()
        _have(images.node_image(), published=False)
        compiling.result()
    _link_tools()


def _have(image: str, *, published: bool) -> None:
    config = _config(own_network=not published)
    made_of = digest([image, json.dumps(config), layout.HERE / "network.py", layout.HERE / "manifests"])
    if _MADE_OF.exists() and _MADE_OF.read_text() == made_of and reachable():
        say("the cluster is there already")
        return
    down()
    layout.SHARED.mkdir(parents=True, exist_ok=True)
    layout.SHARED.chmod(0o1777)
    with step("create the cluster"):
        _kind("create", "cluster", "--image", image, "--config", "-", stdin=yaml.safe_dump(config), log="kind-create")
    if not published:
        with step("network"):
            network.install(len(config["nodes"]))
    with step("nodes and system pods ready"):
        kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=120s", timeout=150)
        for kind, name in (("deployment", "coredns"), *([] if published else [("daemonset", "kube-router")])):
            kubectl("--namespace", "kube-system", "rollout", "status", f"{kind}/{name}", "--timeout=180s", timeout=200)
    if published:
        load([layout.BASE_IMAGE])
    _MADE_OF.write_text(made_of)


def _link_tools() -> None:
    layout.TOOLS.mkdir(parents=True, exist_ok=True)
    for group, name in ((programs.CLUSTER, "kubectl"), (programs.CLUSTER, "helm"), (programs.KIND, "kind")):
        link = layout.TOOLS / name
        link.unlink(missing_ok=True)
        link.symlink_to(programs.program(group, name))


def down() -> None:
    """Delete the cluster, if there is one."""
    _MADE_OF.unlink(missing_ok=True)
    if layout.CLUSTER in _kind("get", "clusters").split():
        with step("delete the cluster"):
            _kind("delete", "cluster", "--name", layout.CLUSTER)
            if environment():  # an engine of the user's may have other clusters on it
                succeeds(["docker", "network", "rm", "kind"], env=environment())
    layout.KUBECONFIG.unlink(missing_ok=True)


def load(names: list[str]) -> None:
    """Copy images of the engine to the workers, in one archive, so that layers they share are sent once."""
    nodes = _workers()
    with step(f"load {' '.join(names)}"):
        _kind("load", "docker-image", "--name", layout.CLUSTER, "--nodes", ",".join(nodes), *names)
        for node in nodes:
            # What is unpacked is not kept packed as well.
            docker("exec", node, *_CTR, "content", "prune", "references")


def unload(names: list[str]) -> None:
    """Take images off the workers; pods that run of them go on."""
    for node in _workers() if names else []:
        lines = docker("exec", node, *_CTR, "images", "ls").splitlines()[1:]
        digests = {words[0]: words[2] for words in map(str.split, lines)}
        # An image is gone when its last name is, and containerd knows it by names of its own as well.
        tagged = {name: digest for name, digest in digests.items() if "/" in name}
        named = {name for name in tagged if name.endswith(tuple(f"/{unwanted}" for unwanted in names))}
        kept = {digest for name, digest in tagged.items() if name not in named}
        gone = {tagged[name] for name in named} - kept
        forgotten = named | {name for name, digest in digests.items() if digest in gone}
        if forgotten:
            docker("exec", node, *_CTR, "images", "rm", *sorted(forgotten))


def name(image: str, other: str) -> None:
    """Let an image of the workers go by another name too, taken from the image that has it; the engine has none of it.

    Pods that run go on with the image that they were started with.
    """
    for node in _workers():
        docker("exec", node, *_CTR, "images", "tag", "--force", _reference(image), _reference(other))


def _reference(image: str) -> str:
    """An image's name with its registry, as containerd knows it and pods may leave it out."""
    first, slash, _ = image.partition("/")
    if slash and (first == "localhost" or any(sign in first for sign in ".:")):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def _workers() -> list[str]:
    nodes = _kind("get", "nodes", "--name", layout.CLUSTER).split()
    return [node for node in nodes if not node.endswith("control-plane")]


def _config(*, own_network: bool) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(layout.KIND_CONFIG.read_text())
    mounts = [
        {"hostPath": str(path), "containerPath": str(path), "readOnly": read_only}
        for path, read_only in layout.mounts()
    ]
    config["name"] = layout.CLUSTER
    for node in config["nodes"]:
        node["extraMounts"] = mounts
    if own_network:
        config["networking"]["disableDefaultCNI"] = True
    return config


def _can_pull() -> bool:
    """Whether kind's published node image is here or can be pulled."""
    inspect = ["docker", "image", "inspect", _PUBLISHED_IMAGE]
    pull = ["docker", "pull", "--quiet", _PUBLISHED_IMAGE]
    return succeeds(inspect, env=environment()) or succeeds(pull, env=environment(), timeout=600)


def _kind(*arguments: str, stdin: str | None = None, log: str | None = None) -> str:
    installed = shutil.which("kind")
    program = Path(installed) if installed else programs.program(programs.KIND, "kind")
    kubeconfig = ["--kubeconfig", str(layout.KUBECONFIG)] if arguments[0] in ("create", "delete") else []
    return run([program, *arguments, *kubeconfig], env=environment(), stdin=stdin, log=log)
