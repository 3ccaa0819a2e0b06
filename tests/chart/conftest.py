"""Rendering the chart. Where no helm is found, the tests that render are skipped: `make test` needs none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/kitestring"
KUBE_VERSION = "1.34.4"
"""Of the end-to-end tests. A helm that was built without stamps takes the cluster for 1.20."""

Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


def find_helm() -> str | None:
    """$HELM (where there is no such program, the tests fail), a helm on the path, or the one that e2e/ has built."""
    if named := os.environ.get("HELM"):
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kitestring/e2e/programs"
    built = sorted(cache.glob("cluster-*/helm"), key=lambda path: path.stat().st_mtime)
    return shutil.which("helm") or (str(built[-1]) if built else None)


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run helm with some arguments."""
    program = find_helm()
    if program is None:
        pytest.skip("no helm: set HELM, put one on the path, or let e2e/ build one")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def render_text(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """`helm template` of the release kitestring in the namespace system, with --set for each argument."""

    @cache
    def run(*settings: str, values: Path | None = None) -> str:
        arguments = [f"--set={setting}" for setting in settings]
        if values is not None:
            arguments.append(f"--values={values}")
        done = helm(
            "template", "kitestring", str(CHART), "--namespace=system", f"--kube-version={KUBE_VERSION}", *arguments
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def render(render_text: Callable[..., str]) -> Render:
    """The objects that the chart makes."""

    def run(*settings: str, values: Path | None = None) -> list[Manifest]:
        return [item for item in yaml.load_all(render_text(*settings, values=values), yaml.CSafeLoader) if item]

    return run


@pytest.fixture(scope="session")
def refusal(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """What helm says of values that the chart refuses."""

    def run(*settings: str) -> str:
        arguments = [f"--set={setting}" for setting in settings]
        done = helm("template", "kitestring", str(CHART), f"--kube-version={KUBE_VERSION}", *arguments)
        assert done.returncode != 0, "accepted"
        return done.stderr

    return run


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [item for item in objects if item["kind"] == kind]
