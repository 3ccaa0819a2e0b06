"""Fixtures of the end-to-end tests: the cluster, the installation on it, a namespace for each scenario."""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from e2e.harness import images as image_set
from e2e.harness import release as installation
from e2e.harness import storage
from e2e.harness.api import Api
from e2e.harness.explain import explain
from e2e.harness.images import Images
from e2e.harness.kinds import DEFINITION, NAMESPACE
from e2e.harness.kubectl import Kubectl
from e2e.harness.namespace import LABEL, Namespace
from e2e.harness.release import Release
from e2e.node import kube, layout
from e2e.node.progress import step
from kitestring_rollout.storage import ObjectStore

# Packages of the environment bring a `tests` of theirs; scenarios share documents with ours.
sys.modules["tests"] = tests = ModuleType("tests")
tests.__path__ = [str(layout.REPOSITORY / "tests")]

ARTIFACTS = layout.REPOSITORY / "build" / "e2e"
KEEP = bool(os.environ.get("E2E_KEEP"))
"""Leave namespaces of failed scenarios and the installation as they are, to look at them."""
SCENARIO_SECONDS = 600
"""A scenario that names no limit of its own (`pytest.mark.timeout`)."""

_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """The two sets of scenarios."""
    config.addinivalue_line("markers", "core: in every build; fifteen minutes on two cores in all")
    config.addinivalue_line("markers", "full: before a release; with Kueue, lost nodes, thousands of pods")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every scenario a limit, fixtures not counted: building and installing happens in the first one's."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_SECONDS, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed scenario what the cluster says, before its namespace goes."""
    report = yield
    if report.failed and call.when in ("setup", "call"):
        item.stash[_failed] = True
        fixtures = getattr(item, "funcargs", {})
        if isinstance(api := fixtures.get("api"), Api):
            spaces = [made.name for made in fixtures.values() if isinstance(made, Namespace)]
            spaces.append(installation.NAME)
            folder = ARTIFACTS / re.sub(r"\W+", "-", item.name).strip("-")
            report.sections.append(("cluster", explain(api, spaces, folder)))
    return report


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    """kubectl against the cluster, which `e2e/cluster up` has made."""
    if not kube.reachable():
        pytest.exit(f"no cluster answers at {kube.kubeconfig()}: make e2e-up", returncode=2)
    return Kubectl(kube.binary(), kube.kubeconfig())


@pytest.fixture(scope="session")
def api(kubectl: Kubectl) -> Api:
    """The cluster's API."""
    return Api(kubectl.kubeconfig)


@pytest.fixture(scope="session")
def images(alone: None, kubectl: Kubectl) -> Images:
    """Images of this checkout, on the cluster. Of other checkouts there are none any more."""
    return image_set.provide()


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """Only one session at a time installs and removes things on the cluster; another one waits."""
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with (layout.CACHE / "session.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step("another session of the end-to-end tests runs: wait for its end"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def release(alone: None, api: Api, images: Images) -> Iterator[Release]:
    """The chart, installed; namespaces that an interrupted session left are removed first."""
    for forgotten in api.listed(NAMESPACE, selector=f"{LABEL}=scenario"):
        api.delete(NAMESPACE, forgotten["metadata"]["name"])
    release = Release(api, images)
    if kube.external_kubeconfig() is not None and (others := installation.of_others(api.listed(DEFINITION))):
        remedy = (
            "name a cluster without Kitestring, or remove that one and then its definitions, with which its runs go"
        )
        pytest.exit(f"the cluster has {', '.join(others)} of another installation: {remedy}", returncode=2)
    try:
        release.install()
        yield release
    finally:
        if not KEEP:
            release.remove()


@pytest.fixture
def namespace(request: pytest.FixtureRequest, api: Api, kubectl: Kubectl, release: Release) -> Iterator[Namespace]:
    """A namespace for one scenario. At its end nothing of it may stay."""
    name = request.node.name.removeprefix("test_")
    space = Namespace.create(api, name, kubectl)
    yield space
    if not (KEEP and request.node.stash.get(_failed, False)):
        space.remove()


@pytest.fixture
def store(kubectl: Kubectl, release: Release, tmp_path: Path) -> Iterator[ObjectStore]:
    """The installation's object storage, all runs of it."""
    with storage.opened(kubectl, tmp_path) as opened:
        yield opened
