"""Programs built from Go modules: Kubernetes and what stands around it, and two small ones of our own.

Each group has a module of its own under `go/` whose go.mod and go.sum pin everything; binaries lie in the cache under a
digest of their inputs, so that nothing is compiled twice.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.node import layout
from e2e.node.command import Failed, digest, run
from e2e.node.progress import step

KUBERNETES_VERSION: Final = "v1.34.4"
"""The last minor version that runs on cgroup v1 without a setting."""


@dataclass(frozen=True)
class Group:
    """Programs of one Go module, by name, with the package of each."""

    name: str
    packages: dict[str, str]
    ldflags: str = "-s -w"


_VERSION_FLAGS: Final = " ".join(
    f"-X {variable}={value}"
    for variable, value in {
        "k8s.io/component-base/version.gitVersion": KUBERNETES_VERSION,
        "k8s.io/component-base/version.gitMajor": "1",
        "k8s.io/component-base/version.gitMinor": KUBERNETES_VERSION.split(".")[1],
        "k8s.io/component-base/version.gitTreeState": "clean",
        "k8s.io/client-go/pkg/version.gitVersion": KUBERNETES_VERSION,
    }.items()
)
_KUBERNETES: Final = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubeadm",
    "kubectl",
)

KIND: Final = Group("kind", {"kind": "sigs.k8s.io/kind"})
CLUSTER: Final = Group(
    "cluster",
    {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES}
    | {
        "etcd": "go.etcd.io/etcd/server/v3",
        "coredns": "./coredns",
        "kube-router": "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
        "helm": "helm.sh/helm/v3/cmd/helm",
    },
    f"-s -w {_VERSION_FLAGS}",
)
"""One module, so that the libraries which all of them use are compiled once."""
OWN: Final = Group("own", {"thin-runc": "./thin-runc", "pause": "./pause"})
KWOK: Final = Group("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"})
KUEUE: Final = Group("kueue", {"manager": "sigs.k8s.io/kueue/cmd/kueue"})

_building: dict[str, threading.Lock] = {group.name: threading.Lock() for group in (KIND, CLUSTER, OWN, KWOK, KUEUE)}


def key(group: Group) -> str:
    """Digest of what the programs of a group are made from."""
    version = run(["go", "env", "GOVERSION", "GOARCH"])
    return digest([layout.GO_MODULES / group.name, repr(sorted(group.packages.items())), group.ldflags, version])


def folder_of(group: Group) -> Path:
    """Where the programs of a group lie, compiled or not."""
    return layout.PROGRAMS / f"{group.name}-{key(group)}"


def build(group: Group) -> Path:
    """Folder with the programs of a group, compiled when their inputs changed."""
    with _building[group.name]:
        folder = folder_of(group)
        if folder.is_dir():
            return folder
        if shutil.which("go") is None:
            raise Failed(
                "go is not installed: without a Docker engine that can pull images, the cluster is built with Go ≥ 1.26"
            )
        with step(f"compile {group.name}"):
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            flags = ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", group.ldflags]
            log = f"build-{group.name}"
            module, environment = layout.GO_MODULES / group.name, {"CGO_ENABLED": "0", "GOWORK": "off"}
            run(
                ["go", "build", *flags, "-o", f"{partial}/", *group.packages.values()],
                cwd=module,
                env=environment,
                log=log,
            )
            for name, package in group.packages.items():
                (partial / _compiled_name(package)).rename(partial / name)
            for old in layout.PROGRAMS.glob(f"{group.name}-????????????"):
                shutil.rmtree(old)
            partial.rename(folder)
        return folder


def _compiled_name(package: str) -> str:
    """What the compiler calls a program: the last part of its path that is no version."""
    *parents, last = package.split("/")
    return parents[-1] if re.fullmatch(r"v\d+", last) else last


def build_all(groups: Sequence[Group]) -> None:
    """Compile several groups, one after the other: each takes all cores by itself."""
    for group in groups:
        build(group)


def program(group: Group, name: str) -> Path:
    """Path of one program, compiled when needed."""
    return build(group) / name


def module_folder(group: Group, module: str) -> Path:
    """Where Go keeps the files of a module that a group uses, at the pinned version."""
    found = run(
        ["go", "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module],
        cwd=layout.GO_MODULES / group.name,
        env={"GOWORK": "off"},
    )
    if not found.strip():
        run(["go", "mod", "download", module], cwd=layout.GO_MODULES / group.name, env={"GOWORK": "off"})
        return module_folder(group, module)
    return Path(found.strip())
