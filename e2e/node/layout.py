"""Where everything lies: the checkout, the cache, and what a running cluster keeps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

CLUSTER: Final = "kitestring-e2e"
"""Name of the kind cluster; its nodes are `kitestring-e2e-control-plane`, `-worker`, `-worker2`."""
BASE_IMAGE: Final = "kitestring-e2e/base:python3.11"
"""Debian with Python, on which the images of `images/` are built where none can be pulled."""

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parent.parent
GO_MODULES: Final = HERE / "go"
IMAGE_FILES: Final = HERE / "image"
KIND_CONFIG: Final = HERE.parent / "kind.yaml"

CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kitestring" / "e2e"
PROGRAMS: Final = CACHE / "programs"
LOGS: Final = CACHE / "logs"
ENGINE_DATA: Final = CACHE / "engine"
SHARED: Final = CACHE / "shared"
"""Mounted into every node at this path, writable: for caches that pods share."""
RUN: Final = CACHE / "run"
"""What lives only as long as the cluster: sockets, pid files, the kubeconfig."""
TOOLS: Final = RUN / "bin"
"""Links to kubectl, helm and kind, for a shell."""
KUBECONFIG: Final = RUN / "kubeconfig"

VENV: Final = Path(os.environ.get("E2E_VENV") or REPOSITORY / ".venv").absolute()
INTERPRETER: Final = Path(sys.base_prefix).resolve()
"""The installation that the virtual environment refers to."""


def is_system_python() -> bool:
    """Whether the environment's interpreter is the system's own, which nodes and images have themselves."""
    return INTERPRETER.samefile("/usr")


def mounts() -> list[tuple[Path, bool]]:
    """Folders that every node has at the same path as the host, and whether they are read-only there."""
    read_only = [REPOSITORY]
    if not VENV.is_relative_to(REPOSITORY):
        read_only.append(VENV)
    if not is_system_python():
        read_only.append(INTERPRETER)
    return [(path, True) for path in read_only] + [(SHARED, False)]
