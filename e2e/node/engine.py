"""The Docker engine: the one that answers, or one started here with everything of its own below the cache."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from e2e.node import layout, programs
from e2e.node.command import Failed, run, succeeds
from e2e.node.progress import say, step

SOCKET: Final = layout.RUN / "docker.sock"
PID_FILE: Final = layout.RUN / "dockerd.pid"
EXEC_ROOT: Final = layout.RUN / "engine"
_CAP_SYS_RESOURCE: Final = 24


def environment() -> dict[str, str]:
    """What makes `docker` and `kind` speak to the engine in use."""
    if not _pid():
        return {}
    # Debian's engine has no BuildKit plug-in beside it.
    return {"DOCKER_HOST": f"unix://{SOCKET}", "DOCKER_BUILDKIT": "0", "DOCKER_CLI_HINTS": "false"}


def docker(*arguments: str | Path, log: str | None = None, stdin: str | None = None) -> str:
    """Run docker against the engine in use."""
    return run(["docker", *arguments], env=environment(), log=log, stdin=stdin)


def image_exists(name: str) -> bool:
    """Whether the engine has an image."""
    return succeeds(["docker", "image", "inspect", name], env=environment())


@contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """An empty folder, for the context of a build."""
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.CACHE, prefix=purpose) as folder:
        yield Path(folder)


def remove_other_tags(name: str) -> list[str]:
    """Remove images of the same repository under other tags; returns their names."""
    repository = name.rsplit(":", 1)[0]
    listed = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository).split()
    others = [other for other in listed if other != name]
    if others:
        docker("image", "rm", "--force", *others)
    return others


def answers() -> bool:
    """Whether an engine can be spoken to, ours or another."""
    return shutil.which("docker") is not None and succeeds(["docker", "version"], env=environment(), timeout=20)


def lacks_resource_capability() -> bool:
    """Whether this machine's root has no CAP_SYS_RESOURCE: privileged containers then need `thin-runc`."""
    status = Path("/proc/self/status").read_text()
    bounding = next(line for line in status.splitlines() if line.startswith("CapBnd"))
    return not int(bounding.split()[1], 16) >> _CAP_SYS_RESOURCE & 1


def start() -> None:
    """Have an engine that answers; installs and starts one where none does."""
    if answers():
        return
    if os.geteuid() != 0:
        raise Failed(
            "no Docker engine answers, and only root can start one: start Docker, or set KUBECONFIG to a cluster"
        )
    _install()
    layout.RUN.mkdir(parents=True, exist_ok=True)
    options: list[str | Path] = [
        *("--data-root", layout.ENGINE_DATA),
        *("--exec-root", EXEC_ROOT),
        *("--pidfile", PID_FILE),
        *("--host", f"unix://{SOCKET}"),
    ]
    if lacks_resource_capability():
        options += ["--add-runtime", f"thin={programs.program(programs.OWN, 'thin-runc')}", "--default-runtime", "thin"]
    with step("start the Docker engine"):
        layout.LOGS.mkdir(parents=True, exist_ok=True)
        log_path = layout.LOGS / "dockerd.log"
        with log_path.open("w") as log:
            daemon = subprocess.Popen(
                ["dockerd", *map(str, options)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while not (PID_FILE.exists() and answers()):
            if daemon.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join(log_path.read_text().splitlines()[-15:])
                raise Failed(f"dockerd did not come up; {log_path} ends with:\n{tail}")
            time.sleep(0.2)


def stop() -> None:
    """End the engine that `start` started, and what it left in the kernel; another's engine is left alone."""
    pid = _pid()
    if pid is None:
        return
    with step("stop the Docker engine"):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while _is_engine(pid):
            if time.monotonic() > deadline:
                say(f"dockerd (process {pid}) does not end on SIGTERM within 60 s: killing it")
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + 60
            time.sleep(0.1)
        PID_FILE.unlink(missing_ok=True)
        SOCKET.unlink(missing_ok=True)
        succeeds(["ip", "link", "delete", "docker0"])
        for mounted in EXEC_ROOT.glob("netns/*"):  # else nobody can delete the cache
            succeeds(["umount", str(mounted)])


def _install() -> None:
    missing = [
        package
        for program, package in (("dockerd", "docker.io"), ("debootstrap", "debootstrap"))
        if shutil.which(program) is None
    ]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Failed(
            f"{' and '.join(missing)} must be installed: no Docker engine answers, and this is no Debian system"
        )
    with step(f"install {' '.join(missing)}"):
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "--no-install-recommends", "iptables", *missing]
        # What apt knows already may do, and a foreign source that does not answer is no reason to fail.
        if not succeeds(install, env=environment, timeout=600):
            run(["apt-get", "update"], env=environment, log="apt-update")
            run(install, env=environment, log="apt-install")


def _pid() -> int | None:
    """Process of the engine that `start` started, while it runs."""
    try:
        pid = int(PID_FILE.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if _is_engine(pid) else None


def _is_engine(pid: int) -> bool:
    try:
        return str(PID_FILE).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
