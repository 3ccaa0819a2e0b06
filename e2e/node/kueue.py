"""Kueue, for the tests of queueing: built, loaded and installed on demand."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import yaml

from e2e.node import kind, programs
from e2e.node.command import Failed
from e2e.node.engine import image_exists, scratch
from e2e.node.images import build, copy_program
from e2e.node.kube import kubectl
from e2e.node.progress import step

NAMESPACE: Final = "kueue-system"
_MODULE: Final = "sigs.k8s.io/kueue"


def install() -> None:
    """Have Kueue on the cluster, its webhooks answering."""
    image = f"kitestring-e2e/kueue:{programs.key(programs.KUEUE)}"
    if not image_exists(image):
        with scratch("kueue-") as context:
            copy_program(programs.program(programs.KUEUE, "manager"), context / "manager")
            build("kueue", image, context)
    kind.load([image])
    with step("install Kueue"):
        objects = _manifests(image)
        kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=json.dumps(_list(objects)))
        rollout = ["rollout", "status", "deployment/kueue-controller-manager", "--timeout=180s"]
        kubectl("--namespace", NAMESPACE, *rollout, timeout=200)
        _await_webhooks()


def _await_webhooks() -> None:
    """Until the API server reaches them: moments after the pod is ready it may still be refused."""
    probe = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "probe"}}
    deadline = time.monotonic() + 60
    while True:
        try:
            kubectl("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(probe))
        except Failed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def remove() -> None:
    """Take Kueue off the cluster, with its definitions and what was made of them."""
    with step("remove Kueue"):
        objects = _manifests("removed")
        definitions = [item for item in objects if item["kind"] == "CustomResourceDefinition"]
        others = [item for item in objects if item["kind"] != "CustomResourceDefinition"]
        # Definitions go first: what was made of them has finalizers that the manager must take off.
        for part in (definitions, others):
            listed = json.dumps(_list(part))
            kubectl("delete", "--ignore-not-found", "--filename", "-", stdin=listed, timeout=180)


def _manifests(image: str) -> list[dict[str, Any]]:
    folder = programs.module_folder(programs.KUEUE, _MODULE) / "config" / "default"
    objects = [item for item in yaml.safe_load_all(kubectl("kustomize", folder)) if item]
    for item in objects:
        if item["kind"] == "Deployment":
            container = item["spec"]["template"]["spec"]["containers"][0]
            container.update(image=image, imagePullPolicy="IfNotPresent")
    # While its aggregated API does not answer, the cluster deletes no namespace at all; nothing here asks it anything.
    return [item for item in objects if item["kind"] != "APIService"]


def _list(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": objects}
