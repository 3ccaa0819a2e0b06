"""A pod on this machine: the launcher as a process, started again as by a kubelet, and a worker at its socket."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kitestring_rollout.worker.config import WorkerConfig
from tests.worker.conftest import PATH, WorkerApart, WorkerHere

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "rollout" / "launcher"
RESTART_CODES = (1, 3)
KILLED = "the container of the agents was killed while they ran, as for their memory"
"""Of an agent whose launcher has gone without a word."""
"""After which a container is started again here. A kubelet does so after others too, but no test waits for that."""


def built_launcher() -> Path:
    """The binary of the sources as they are, built once per machine and state of the sources."""
    if shutil.which("go") is None:
        pytest.skip("no Go toolchain here builds the launcher")
    digest = hashlib.sha256()
    for file in [*sorted(SOURCES.glob("*.go")), SOURCES / "go.mod", SOURCES / "build.sh"]:
        digest.update(file.read_bytes())
    digest.update((ROOT / "rollout/kitestring_rollout/launcher/launcher.py").read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kitestring"
    folder = cache / f"launcher-{digest.hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=cache))
        subprocess.run([str(SOURCES / "build.sh"), str(building / "launcher")], check=True)
        building.chmod(0o755)
        try:
            building.rename(folder)
        except OSError:  # another process of the tests was faster
            shutil.rmtree(building)
    return folder / "launcher"


class Container:
    """The launcher's process; what it says on standard error goes to that of the tests."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, uid: int | None = None) -> None:
        self._command = command
        self._env = env
        self._cwd = cwd
        self._uid = uid
        self.codes: list[int] = []
        self.process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[None] | None = None
        self.restarts = True

    async def start(self) -> None:
        self.process = await self._begin()
        self._running = asyncio.create_task(self._run(self.process))

    async def _begin(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            env=dict(self._env),
            cwd=self._cwd,
            user=self._uid,
            group=self._uid,
            extra_groups=[] if self._uid else None,
            start_new_session=True,
        )

    async def _run(self, process: asyncio.subprocess.Process) -> None:
        self.codes.append(await process.wait())
        while self.restarts and (self.codes[-1] in RESTART_CODES or self.codes[-1] < 0):
            self.process = await self._begin()
            self.codes.append(await self.process.wait())

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def ended(self) -> int:
        """Its last exit code."""
        assert self._running is not None
        await asyncio.wait_for(asyncio.shield(self._running), 15)
        return self.codes[-1]

    async def remove(self) -> None:
        """As when the pod goes: at once."""
        self.restarts = False
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
        await self.ended()


NOBODY = 65534


def _runs_python(uid: int) -> bool:
    command = ["python3", "-c", ""]
    return subprocess.run(command, env={"PATH": PATH}, user=uid, extra_groups=[], cwd="/", check=False).returncode == 0


AGENT_UID = NOBODY if os.getuid() == 0 and _runs_python(NOBODY) else None
"""Another user than the worker's, where the tests may choose and that user has a Python."""


def in_pod(config: WorkerConfig, folder: Path) -> WorkerConfig:
    return config.model_copy(update={"launcher_socket": folder / "socket" / "launcher.sock"})


def installed_launcher(folder: Path) -> Path:
    """The launcher in a folder that the agents' user can read, as an init container puts it there."""
    target = folder / "bin"
    target.mkdir(exist_ok=True)
    subprocess.run([str(built_launcher()), "install", str(target)], check=True)
    return target / "launcher"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """What containers of other users may enter, with a scratch folder for the agents."""
    folder = Path(tempfile.mkdtemp(prefix="pod-"))
    folder.chmod(0o755)
    (folder / "scratch").mkdir()
    if AGENT_UID is not None:
        os.chown(folder / "scratch", AGENT_UID, AGENT_UID)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class _InPod(WorkerHere):
    """Worker and launcher together, as an executor."""

    def __init__(self, config: WorkerConfig, container: Container) -> None:
        super().__init__(config)
        self.container = container

    async def begin(self) -> None:
        await super().begin()
        await self.container.start()


class PodHere(_InPod):
    """The worker in this process."""


class PodApart(_InPod, WorkerApart):
    def kill(self) -> None:
        self.container.restarts = False
        super().kill()
