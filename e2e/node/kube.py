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


def binary(name: str = "kubectl") -> Path:
    """The kubectl or helm that was built here with the cluster, else the one on the path. Raises Failed."""
    if shutil.which("go") and (built := programs.folder_of(programs.CLUSTER) / name).exists():
        return built
    found = shutil.which(name)
    if found is None:
        raise Failed(f"{name} is not on the path: install it, or let `make e2e-up` build a cluster and {name} with it")
    return Path(found)


def kubectl(*arguments: str | Path, stdin: str | None = None, timeout: float = 120) -> str:
    """Standard output of kubectl."""
    return run([binary(), "--kubeconfig", kubeconfig(), *arguments], stdin=stdin, timeout=timeout)


def reachable() -> bool:
    """Whether the cluster's API answers."""
    return kubeconfig().exists() and succeeds(
        [binary(), "--kubeconfig", kubeconfig(), "get", "--raw", "/readyz"], timeout=10
    )
