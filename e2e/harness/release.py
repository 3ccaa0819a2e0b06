"""The installation: the chart, installed by helm as a user does it."""

from __future__ import annotations

import json
import os
from typing import Any, Final

from e2e.harness.api import Api
from e2e.harness.images import Images
from e2e.harness.kinds import DEFINITION, NAMESPACE, POD
from e2e.harness.kubectl import call
from e2e.node import layout, programs
from e2e.node.progress import step
from kitestring_api import names

NAME: Final = "kitestring-e2e"
BUCKET: Final = "kitestring"
ACCESS_KEY: Final = "kitestring"
SECRET_KEY: Final = "only-for-tests-0123456789"
CHART: Final = layout.REPOSITORY / "charts" / "kitestring"


class Release:
    """The operator and its object storage, in a namespace of the release's name."""

    def __init__(self, api: Api, images: Images) -> None:
        self.api = api
        self.images = images
        self.namespace = NAME
        self._values: dict[str, Any] = values(images)

    def install(self, **changes: Any) -> None:
        """`helm upgrade --install` with the tests' values and `changes` of top-level ones; waits until it is ready."""
        self._values |= changes
        with step("install the chart"):
            options = ["--namespace", NAME, "--create-namespace", "--wait", "--timeout", "180s", "--values", "-"]
            self._helm("upgrade", "--install", NAME, str(CHART), *options, stdin=json.dumps(self._values), seconds=240)

    def uninstall(self) -> None:
        """Take everything away again, the definitions too, which a user would keep."""
        with step("uninstall the chart"):
            self._helm("uninstall", NAME, "--namespace", NAME, "--ignore-not-found", "--wait", "--timeout", "120s")
            for plural in ("trainingruns", "rolloutpools"):
                self.api.delete(DEFINITION, f"{plural}.{names.GROUP}")
            self.api.delete(NAMESPACE, NAME)
            self.api.until_gone(NAMESPACE, None, seconds=120, name=NAME)

    @property
    def values(self) -> dict[str, Any]:
        """The chart's values as they are installed."""
        return dict(self._values)

    def operators(self) -> list[str]:
        """Names of the operator's pods."""
        selector = "app.kubernetes.io/name=kitestring"
        return [pod["metadata"]["name"] for pod in self.api.listed(POD, NAME, selector)]

    def _helm(self, *arguments: str, stdin: str | None = None, seconds: float = 180) -> str:
        helm = os.environ.get("E2E_HELM") or str(programs.program(programs.CLUSTER, "helm"))
        return call([helm, "--kubeconfig", str(self.api.kubeconfig), *arguments], stdin=stdin, seconds=seconds)


def values(images: Images) -> dict[str, Any]:
    """Values of the chart for the tests: SeaweedFS, heavy environments mounted."""
    mounted = _mounted_template(images)
    chosen: dict[str, Any] = {
        "images": {
            "operator": images.operator,
            "rollout": images.rollout,
            "trainer": images.trainer,
            "policyServerCpu": images.policy_server,
        },
        "settings": {"defaultTemplates": mounted},
        "seaweedfs": {
            "enabled": True,
            "bucket": BUCKET,
            "accessKeyId": ACCESS_KEY,
            "secretAccessKey": SECRET_KEY,
        },
    }
    if images.seaweedfs:
        chosen["images"]["seaweedfs"] = images.seaweedfs
    return chosen


def _mounted_template(images: Images) -> dict[str, Any]:
    """What the pods of trainer and policy servers get: this machine's folders, read-only, at their own paths."""
    if not images.mounted:
        return {}
    named = [(f"host-{number}", path) for number, path in enumerate(images.mounted)]
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path in named]
    volumes = [{"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path in named]

    def template(*containers: str, init: tuple[str, ...] = ()) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "volumes": volumes,
            "containers": [{"name": name, "volumeMounts": mounts} for name in containers],
        }
        if init:
            spec["initContainers"] = [{"name": name, "volumeMounts": mounts} for name in init]
        return {"spec": spec}

    return {"trainer": template("trainer"), "policyServer": template("server")}
