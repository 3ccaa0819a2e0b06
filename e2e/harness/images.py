"""The images that the scenarios run: built from this checkout under a tag of their inputs, loaded into the cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import yaml

from e2e.harness.agents import FOLDER
from e2e.harness.kubectl import call
from e2e.node import kind, kube, layout
from e2e.node.command import Failed, digest
from e2e.node.engine import environment, image_exists, remove_other_tags, scratch
from e2e.node.images import build, copy_program
from e2e.node.progress import step
from kitestring_api import names

_EXAMPLE: Final = layout.REPOSITORY / "examples" / "calculator"
_BUILT: Final = ("operator", "rollout", "calculator-agent")
_SOURCES: Final = (
    "crds",
    "rollout",
    "trainer",
    "operator",
    "cli",
    "examples/calculator",
    "images",
    "locks",
    "pyproject.toml",
)


@dataclass(frozen=True)
class Images:
    """Names of images, and what their pods must mount: heavy environments are mounted, not baked."""

    operator: str
    rollout: str
    trainer: str
    policy_server: str
    agent: str
    seaweedfs: str
    python: str
    """A plain Python 3.11, for agents that are a few lines."""
    static: str
    """One static program, `/agent`, and nothing else: `e2e/agents/static`."""
    mounted: tuple[str, ...] = ()
    """Folders that trainer and policy servers mount from their node; none where their images hold everything."""


def provide() -> Images:
    """Images of this checkout on the cluster; its nodes have the quick start's agent under the name in the example too.

    On a cluster of the user's own: those that E2E_IMAGE_PREFIX and E2E_IMAGE_TAG name, which it must be able to pull.
    """
    if kube.external_kubeconfig() is not None:
        return _named()
    key = _key()
    prefix = "kitestring-e2e/"
    built = [f"{prefix}{name}:{key}" for name in _BUILT]
    if not all(map(image_exists, built)):
        with step(f"build {', '.join(_BUILT)}"):
            command = ["images/build.sh", *_BUILT, "--base-image", layout.BASE_IMAGE, "--prefix", prefix, "--tag", key]
            call(command, seconds=900, env=environment(), cwd=layout.REPOSITORY)
    mounted, seaweedfs, static = _mounted_image(), _seaweedfs_image(), _static_image()
    kind.load([*built, mounted, seaweedfs, static])
    operator, rollout, agent = built
    kind.name(agent, _name_in_example())
    kind.unload([old for image in (*built, static) for old in remove_other_tags(image)])
    return Images(
        operator=operator,
        rollout=rollout,
        trainer=mounted,
        policy_server=mounted,
        agent=agent,
        seaweedfs=seaweedfs,
        python=layout.BASE_IMAGE,
        static=static,
        mounted=tuple(str(path) for path, read_only in layout.mounts() if read_only),
    )


def _named() -> Images:
    prefix, tag = os.environ.get("E2E_IMAGE_PREFIX"), os.environ.get("E2E_IMAGE_TAG")
    if not prefix or not tag:
        raise Failed("KUBECONFIG names a cluster: name images that it can pull in E2E_IMAGE_PREFIX and E2E_IMAGE_TAG")
    return Images(
        operator=f"{prefix}operator:{tag}",
        rollout=f"{prefix}rollout:{tag}",
        trainer=f"{prefix}trainer:{tag}",
        policy_server=f"{prefix}policy-server-cpu:{tag}",
        agent=f"{prefix}calculator-agent:{tag}",
        seaweedfs="",
        python="python:3.11-slim-bookworm",
        static=f"{prefix}static-agent:{tag}",
    )


def _key() -> str:
    """Digest of every file that may get into an image: those that git tracks, as they lie here."""
    listed = call(["git", "ls-files", "-z", *_SOURCES], cwd=layout.REPOSITORY).split("\0")
    paths = [layout.REPOSITORY / name for name in listed if name]
    return digest([layout.BASE_IMAGE, *[part for path in paths if path.is_file() for part in (str(path), path)]])


def _name_in_example() -> str:
    """What the quick start calls its agent's image: a tag that stays, whatever the checkout has in it."""
    for item in yaml.safe_load_all((_EXAMPLE / "trainingrun.yaml").read_text()):
        if item["kind"] == names.KIND_ROLLOUT_POOL:
            (agent,) = (one for one in item["spec"]["template"]["spec"]["containers"] if one["name"] == "agent")
            return str(agent["image"])
    raise Failed(f"{_EXAMPLE / 'trainingrun.yaml'} has no {names.KIND_ROLLOUT_POOL}")


def _mounted_image() -> str:
    """An image that runs `kitestring` from the mounted environment, in the folder of the quick start."""
    python = layout.VENV / "bin" / "python"
    for script, made in (("make_tasks.py", "tasks"), ("make_policy.py", "model")):
        if not (_EXAMPLE / made).is_dir():
            with step(f"{script} of the quick start"):
                call([str(python), str(_EXAMPLE / script)], seconds=300)
    dockerfile = layout.IMAGE_FILES / "mounted.Dockerfile"
    tag = f"kitestring-e2e/mounted:{digest([str(layout.VENV), str(_EXAMPLE), dockerfile])}"
    if not image_exists(tag):
        with scratch("mounted-") as context:
            build("mounted", tag, context, BASE=layout.BASE_IMAGE, VENV=str(layout.VENV), FOLDER=str(_EXAMPLE))
    return tag


def _static_image() -> str:
    """The agent that needs nothing of its image."""
    sources = FOLDER / "static"
    tag = f"kitestring-e2e/static-agent:{digest([sources])}"
    if not image_exists(tag):
        with step(f"build {tag}"):
            call([str(sources / "build.sh"), tag], seconds=300, env=environment())
    return tag


def _seaweedfs_image() -> str:
    """SeaweedFS as its package for Python brings it."""
    weed = layout.VENV / "bin" / "weed"
    tag = f"kitestring-e2e/seaweedfs:{digest([str(weed.stat().st_size), layout.IMAGE_FILES / 'seaweedfs.Dockerfile'])}"
    if not image_exists(tag):
        with scratch("seaweedfs-") as context:
            copy_program(weed, context / "weed")
            build("seaweedfs", tag, context, BASE=layout.BASE_IMAGE)
    return tag
