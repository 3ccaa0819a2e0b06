"""kubectl against the cluster in use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from e2e.node import layout, programs
from e2e.node.command import Failed, run, succeeds


def external_kubeconfig() -> Path | None:
    """The cluster that the user names in KUBECONFIG, when it is not the one made here."""
    named = os.environ.get("KUBECONFIG")
    if not named or Path(named).resolve() == layout.KUBECONFIG.resolve():
        return None
    return Path(named)


def kubeconfig() -> Path:
    """The kubeconfig of the cluster in use."""
    return external_kubeconfig() or layout.KUBECONFIG


def binary() -> Path:
    """The kubectl that was built here, else the one on the path."""
    if shutil.which("go") and (built := programs.folder_of(programs.CLUSTER) / "kubectl").exists():
        return built
    found = shutil.which("kubectl")
    if found is None:
        raise Failed("kubectl is not installed")
    return Path(found)


def kubectl(*arguments: str | Path, stdin: str | None = None, timeout: float = 120) -> str:
    """Standard output of kubectl."""
    return run([binary(), "--kubeconfig", kubeconfig(), *arguments], stdin=stdin, timeout=timeout)


def reachable() -> bool:
    """Whether the cluster's API answers."""
    return kubeconfig().exists() and succeeds(
        [binary(), "--kubeconfig", kubeconfig(), "get", "--raw", "/readyz"], timeout=10
    )
