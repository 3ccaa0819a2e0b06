"""The images that are built where none can be pulled: Debian with Python, and the node of kind with what it runs."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Final

from e2e.node import layout, programs
from e2e.node.command import digest, pipe, run
from e2e.node.engine import docker, environment, image_exists, lacks_resource_capability, remove_other_tags, scratch
from e2e.node.progress import step

SUITE: Final = "bookworm"
"""Debian 12: its Python is 3.11."""
PACKAGES: Final = ("ca-certificates", "python3", "python3-venv")
KUBE_ROUTER_IMAGE: Final = "kitestring-e2e/kube-router:local"
_CONTROL_PLANE: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


def base_image() -> str:
    """Debian with Python, under `layout.BASE_IMAGE` and under a tag of its inputs; returns the latter."""
    tag = f"kitestring-e2e/base:{digest([SUITE, *PACKAGES])}"
    if not image_exists(tag):
        with step("Debian root"), scratch("root-") as folder:
            root = folder / "root"
            run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root], log="debootstrap")
            for leftover in ("var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(root / leftover)
                (root / leftover).mkdir()
            # Pods that run as another user reach an interpreter that is mounted below root's home.
            (root / "root").chmod(0o711)
            pipe(
                ["tar", "-C", root, "-c", "."],
                ["docker", "import", "--change", 'CMD ["python3"]', "-", tag],
                environment(),
            )
    docker("tag", tag, layout.BASE_IMAGE)
    _check_interpreter()
    return tag


def published_base_image() -> None:
    """`layout.BASE_IMAGE` where images can be pulled."""
    tag = f"kitestring-e2e/base:{digest([layout.IMAGE_FILES / 'base.Dockerfile'])}"
    if not image_exists(tag):
        with scratch("base-") as context:
            build("base", tag, context)
    docker("tag", tag, layout.BASE_IMAGE)
    _check_interpreter()


def _check_interpreter() -> None:
    """Fail when the interpreter behind the virtual environment does not run on the base image (its C library)."""
    mount = [] if layout.is_system_python() else ["--volume", f"{layout.INTERPRETER}:{layout.INTERPRETER}:ro"]
    command = [str(Path(sys.executable).resolve()), "-c", "import bz2, ctypes, lzma, readline, sqlite3, ssl, zlib"]
    docker("run", "--rm", "--user", "65532", "--network", "none", *mount, layout.BASE_IMAGE, *command)


def node_image() -> str:
    """The node of kind with the images that a cluster runs in it; returns its tag."""
    groups = (programs.KIND, programs.CLUSTER, programs.OWN)
    thin = "yes" if lacks_resource_capability() else "no"
    files = [Path(__file__), *sorted(layout.IMAGE_FILES.glob("*.Dockerfile"))]
    tag = f"kitestring-e2e/node:{digest([*files, thin, *map(programs.key, groups)])}"
    if image_exists(tag):
        return tag
    base = base_image()
    files_of_kind = programs.module_folder(programs.KIND, "sigs.k8s.io/kind") / "images" / "base" / "files"
    with scratch("node-") as context:
        with step("node's packages"):
            build("net", f"{tag}-net", context, BASE=base)
            _copy_readable(files_of_kind, context / "kind")
            for name in ("kubelet", "kubeadm", "kubectl"):
                copy_program(programs.program(programs.CLUSTER, name), context / "programs" / name)
            copy_program(programs.program(programs.OWN, "thin-runc"), context / "programs" / "thin-runc")
            build("node", f"{tag}-empty", context, BASE=f"{tag}-net", THIN=thin, VERSION=programs.KUBERNETES_VERSION)
        with step("images of the cluster's parts"):
            config = tomllib.loads((files_of_kind / "etc/containerd/config.toml").read_text())
            sandbox = config["plugins"]["io.containerd.grpc.v1.cri"]["sandbox_image"]
            names = _part_images(context / "parts", f"{tag}-net", sandbox)
        with step("node image"):
            _preload(f"{tag}-empty", [*names, layout.BASE_IMAGE], tag)
            docker("image", "rm", f"{tag}-empty", f"{tag}-net", *names)
            remove_other_tags(tag)
    return tag


def _part_images(context: Path, net: str, sandbox: str) -> list[str]:
    """Images of the programs that run in pods, named as kubeadm and containerd's configuration ask for them."""
    kubeadm = programs.program(programs.CLUSTER, "kubeadm")
    listed = run([kubeadm, "config", "images", "list", "--kubernetes-version", programs.KUBERNETES_VERSION]).split()
    by_part = {name.rsplit("/", 1)[-1].split(":")[0]: name for name in listed}
    parts = [(by_part[part], "scratch", programs.CLUSTER, part) for part in _CONTROL_PLANE]
    parts += [
        (by_part["kube-proxy"], net, programs.CLUSTER, "kube-proxy"),
        (by_part["etcd"], "scratch", programs.CLUSTER, "etcd"),
        (by_part["coredns"], "scratch", programs.CLUSTER, "coredns"),
        (KUBE_ROUTER_IMAGE, net, programs.CLUSTER, "kube-router"),
        (sandbox, "scratch", programs.OWN, "pause"),
    ]
    for image, base, group, name in parts:
        copy_program(programs.program(group, name), context / name / name)
        build("program", image, context / name, BASE=base)
    # The image says what to run where no pod spec does.
    for image, name in ((by_part["coredns"], "coredns"), (sandbox, "pause")):
        _entrypoint(image, name)
    return [image for image, *_ in parts]


def _entrypoint(image: str, name: str) -> None:
    container = docker("create", image, name).strip()
    docker("commit", "--change", f'ENTRYPOINT ["/usr/local/bin/{name}"]', "--change", "CMD []", container, image)
    docker("rm", container)


def _preload(empty: str, images: list[str], tag: str) -> None:
    """Commit a node that has images in its containerd."""
    container = docker(
        "run", "--detach", "--entrypoint", "containerd", "--security-opt", "seccomp=unconfined", empty
    ).strip()
    try:
        docker("exec", container, "sh", "-c", "until ctr version >/dev/null 2>&1; do sleep 0.1; done")
        importer = [
            "ctr",
            "--namespace",
            "k8s.io",
            "images",
            "import",
            "--all-platforms",
            "--no-unpack",
            "--digests",
            "-",
        ]
        pipe(["docker", "save", *images], ["docker", "exec", "--interactive", container, *importer], environment())
        docker("stop", container)
        entrypoint = 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]'
        docker("commit", "--change", entrypoint, "--change", "CMD []", container, tag)
    finally:
        docker("rm", "--force", "--volumes", container)


def build(file: str, tag: str, context: Path, **arguments: str) -> None:
    """Build one of the files under `image/`."""
    path = layout.IMAGE_FILES / f"{file}.Dockerfile"
    values = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    proxies = [word for name in ("http_proxy", "https_proxy", "no_proxy") for word in ("--build-arg", name)]
    log = f"image-{tag.rsplit('/', 1)[-1].replace(':', '-')}"
    docker("build", "--network=host", "--file", path, "--tag", tag, *proxies, *values, context, log=log)


def copy_program(program: Path, target: Path) -> None:
    """Put a program into the context of a build."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, target)


def _copy_readable(source: Path, target: Path) -> None:
    """Copy files of the module cache, which are read-only there, as a system's files are: 0644, folders 0755."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
