"""The installation: the chart, installed by helm as a user does it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.harness.api import Api, Object, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import DEFINITION, DEPLOYMENT, NAMESPACE, POD
from e2e.harness.kubectl import call
from e2e.node import kube, layout
from e2e.node.progress import step
from kitestring_api import names

NAME: Final = "kitestring-e2e"
BUCKET: Final = "kitestring"
ACCESS_KEY: Final = "kitestring"
SECRET_KEY: Final = "only-for-tests-0123456789"
CHART: Final = layout.REPOSITORY / "charts" / "kitestring"
KUBE_VERSION: Final = "1.34"
"""For `helm template`, which asks no cluster; a Helm that is built from its module knows none."""
OPERATORS: Final = "app.kubernetes.io/name=kitestring"
"""Selector of their pods."""


class Release:
    """The operator and its object storage, in a namespace of the release's name."""

    def __init__(self, api: Api, images: Images) -> None:
        self.api = api
        self.images = images
        self.namespace = NAME
        self.values: Final = values(images)
        """The chart's values as the tests install it."""

    def install(self, chart: Path = CHART, **changes: Any) -> None:
        """`helm upgrade --install` with the tests' values and `changes` of top-level ones.

        It is ready afterwards, and no operator of an installation before is left.
        """
        with step("install the chart"):
            options = ["--namespace", NAME, "--create-namespace", "--wait", "--timeout", "180s", "--values", "-"]
            chosen = json.dumps(self.values | changes)
            self._helm("upgrade", "--install", NAME, str(chart), *options, stdin=chosen, seconds=240)
            deployment = self.api.get(DEPLOYMENT, NAME, NAME)
            assert deployment is not None
            replicas = deployment["spec"]["replicas"]
            self.api.until(
                POD,
                lambda pods: len(pods) == replicas and all(is_true(pod, "Ready") for pod in pods.values()),
                f"{replicas} operators, and no other",
                seconds=90,
                namespace=NAME,
                selector=OPERATORS,
            )

    def upgrade(self) -> None:
        """As documented: the values that it has, and what is new in the chart's own."""
        options = ["--namespace", NAME, "--reset-then-reuse-values", "--wait", "--timeout", "180s"]
        self._helm("upgrade", NAME, str(CHART), *options, seconds=240)

    def test(self) -> None:
        """`helm test`."""
        self._helm("test", NAME, "--namespace", NAME, "--timeout", "120s")

    @contextmanager
    def changed(self, chart: Path = CHART, **changes: Any) -> Iterator[None]:
        """Another chart or other values for a while; the usual installation is back afterwards."""
        try:
            self.install(chart, **changes)
            yield
        finally:
            self.install()

    def uninstall(self) -> None:
        """`helm uninstall`, which keeps the definitions, and with them runs and pools. No operator is left then."""
        with step("uninstall the chart"):
            self._helm("uninstall", NAME, "--namespace", NAME, "--ignore-not-found", "--wait", "--timeout", "120s")
            self.api.until_gone(POD, NAME, seconds=90, selector=OPERATORS)

    def remove(self) -> None:
        """Take everything away again, the definitions too, which a user would keep."""
        self.uninstall()
        for definition in definitions():
            self.api.delete(DEFINITION, definition)
        self.api.delete(NAMESPACE, NAME)
        self.api.until_gone(NAMESPACE, None, seconds=120, name=NAME)

    def operators(self) -> list[str]:
        """Names of the operator's pods."""
        return [pod["metadata"]["name"] for pod in self.api.listed(POD, NAME, OPERATORS)]

    @property
    def storage(self) -> str:
        """Name of the Service of the chart's SeaweedFS, and of its StatefulSet."""
        return f"{NAME}-seaweedfs"

    def storage_for(self, namespace: str) -> list[dict[str, Any]]:
        """Objects of the chart's SeaweedFS, for another namespace: same names, bucket and keys."""
        options = ["--namespace", namespace, "--kube-version", KUBE_VERSION, "--values", "-"]
        for template in ("seaweedfs", "storage-secret"):
            options += ["--show-only", f"templates/{template}.yaml"]
        text = self._helm("template", NAME, str(CHART), *options, stdin=json.dumps(self.values))
        return [item for item in yaml.safe_load_all(text) if item]

    def _helm(self, *arguments: str, stdin: str | None = None, seconds: float = 180) -> str:
        return call([helm(), "--kubeconfig", str(self.api.kubeconfig), *arguments], stdin=stdin, seconds=seconds)


def helm() -> str:
    """The program."""
    return str(kube.binary("helm"))


def definitions() -> list[str]:
    """Names of the custom resource definitions."""
    return [f"{plural}.{names.GROUP}" for plural in ("trainingruns", "rolloutpools")]


def of_others(found: Iterable[Object]) -> list[str]:
    """Those of these definitions that are Kitestring's and of another installation: without them its runs are gone."""
    owner = "meta.helm.sh/release-name"
    ours = {item["metadata"]["name"]: item["metadata"].get("annotations", {}) for item in found}
    return [name for name in definitions() if name in ours and ours[name].get(owner) != NAME]


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

    def template(container: str) -> dict[str, Any]:
        return {"spec": {"volumes": volumes, "containers": [{"name": container, "volumeMounts": mounts}]}}

    return {"trainer": template("trainer"), "policyServer": template("server")}
