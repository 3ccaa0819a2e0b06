"""The launcher as a file, and as the first process of a container that holds nothing else."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from kitestring_rollout.launcher import launcher
from tests.worker.conftest import PATH, living, worker_config
from tests.worker.executor_contract import Setup, marked, python
from tests.worker.fake_queue import FakeQueue, make_lease
from tests.worker.pod import (
    AGENT_UID,
    SOURCES,
    Container,
    PodHere,
    built_launcher,
    in_pod,
    installed_launcher,
    shared_folder,
)

PROGRAM_HEADER, LOAD = "<IIQQQQQQ", 1
INTERPRETER, DYNAMIC = 3, 2


def segments(file: Path) -> list[int]:
    """Types of the program headers of an ELF file of 64 bits."""
    data = file.read_bytes()
    assert data[:5] == b"\x7fELF\x02"
    offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    return [struct.unpack_from("<I", data, offset + number * size)[0] for number in range(count)]


def built(folder: Path, *arguments: str) -> Path:
    built_launcher()  # or skips
    subprocess.run([str(SOURCES / "build.sh"), str(folder / "launcher"), *arguments], check=True)
    return folder / "launcher"


def test_it_needs_no_library() -> None:
    found = segments(built_launcher())
    assert LOAD in found
    assert INTERPRETER not in found
    assert DYNAMIC not in found


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "rollout"
    shutil.copytree(SOURCES, elsewhere / "launcher")
    (elsewhere / "kitestring_rollout" / "launcher").mkdir(parents=True)
    shutil.copy(launcher.__file__, elsewhere / "kitestring_rollout" / "launcher")
    built_launcher()
    subprocess.run([str(elsewhere / "launcher" / "build.sh"), str(tmp_path / "launcher")], check=True)
    assert (tmp_path / "launcher").read_bytes() == built_launcher().read_bytes()
    assert (tmp_path / "launcher.py").read_bytes() == Path(launcher.__file__).read_bytes()


def test_it_is_built_for_arm_too(tmp_path: Path) -> None:
    file = built(tmp_path, "arm64")
    assert struct.unpack_from("<H", file.read_bytes(), 18)[0] == 183  # EM_AARCH64
    assert INTERPRETER not in segments(file)


def test_it_installs_itself(tmp_path: Path) -> None:
    for _ in range(2):  # an init container may run again
        installed_launcher(tmp_path)
    found = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "bin").iterdir()}
    assert found == {"launcher": "0o555", "launcher.py": "0o444"}


@pytest.mark.parametrize("arguments", [[], ["--socket"], ["--help"], ["agent", "x"]])
def test_wrong_arguments(arguments: list[str]) -> None:
    done = subprocess.run([str(built_launcher()), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert done.stderr.startswith("usage: launcher --socket PATH")


@pytest.mark.parametrize("command", [["go", "vet", "./..."], ["go", "test", "./..."], ["gofmt", "-l", "."]])
def test_the_sources(command: list[str]) -> None:
    built_launcher()
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert command[0] != "gofmt" or not done.stdout


# --- In namespaces of its own -----------------------------------------------------------------------------------------

APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


def _can_be_apart() -> bool:
    return subprocess.run([*APART, "--mount-proc", "true"], capture_output=True, check=False).returncode == 0


apart = pytest.mark.skipif(not _can_be_apart(), reason="namespaces cannot be made here; the end-to-end tests do")


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class FirstProcess(Container):
    """A launcher that is process 1 of a namespace."""

    @property
    def first(self) -> psutil.Process:
        (child,) = psutil.Process(self.pid).children()
        return child


@pytest.fixture
async def pods(folder: Path, queue: FakeQueue) -> AsyncIterator[list[PodHere]]:
    started: list[PodHere] = []
    yield started
    await queue.end()
    for pod in started:
        await pod.stop()
        await pod.container.remove()


async def begun(pods: list[PodHere], container: Container, folder: Path, queue: FakeQueue, setup: Setup) -> PodHere:
    config = in_pod(worker_config(folder, queue.url, setup, []), folder)
    config = config.model_copy(update={"agent": config.agent.model_copy(update={"env": {}})})
    if isinstance(container, EmptyImage):
        config = config.model_copy(update={"scratch_root": Path("/scratch")})
    pods.append(PodHere(config, container))
    await pods[-1].begin()
    return pods[-1]


class EmptyImage(FirstProcess):
    def __init__(self, folder: Path) -> None:
        for name in ("proc", "dev"):
            (folder / name).mkdir()
        os.mknod(folder / "dev" / "null", 0o666 | 0o020000, os.makedev(1, 3))
        installed_launcher(folder)
        command = (*APART, f"--root={folder}", "--mount-proc", "/bin/launcher")
        super().__init__((*command, "--socket", "/socket/launcher.sock"), {"PATH": "/usr/bin:/bin"}, folder)


@apart
async def test_it_runs_where_nothing_else_is(pods: list[PodHere], folder: Path, queue: FakeQueue) -> None:
    """No shell, no Python, no library: the agent is the only other program there is, the launcher itself."""
    setup = Setup(command=["/bin/launcher", "version"])
    pod = await begun(pods, EmptyImage(folder), folder, queue, setup)
    assert (await queue.run(make_lease())).output.startswith("kitestring launcher, go")
    assert names_in(folder) == ["bin", "credential", "dev", "proc", "scratch", "socket"]
    assert names_in(folder / "scratch") == []
    assert "scratch" not in names_in(Path("/"))  # the worker's own root
    await pod.stop()
    assert await pod.container.ended() == 143


def whole_image(folder: Path) -> FirstProcess:
    """As an agent's container is: another user's, without any right of root."""
    walls = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
    if AGENT_UID is not None:
        walls += (f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}", "--clear-groups")
    command = (*APART, "--mount-proc", *walls, installed_launcher(folder), "--socket", folder / "socket/launcher.sock")
    return FirstProcess(command, {"PATH": PATH}, folder)


@apart
async def test_as_the_first_process_it_collects_what_ends(pods: list[PodHere], folder: Path, queue: FakeQueue) -> None:
    marker, mark = marked()
    daemons = "[os.fork() or (os.setsid(), os.fork(), time.sleep(600)) for _ in range(8)]"
    code = f"{mark}import os, time; {daemons}; os.kill(os.getppid(), 9); time.sleep(600)"
    pod = await begun(pods, whole_image(folder), folder, queue, Setup(command=python(code)))
    assert isinstance(pod.container, FirstProcess)
    assert (await queue.run(make_lease())).ended == "signalled"
    await pod.gone(marker)
    async with asyncio.timeout(10):
        while pod.container.first.children():  # noqa: ASYNC110 (that all were collected is said by nobody)
            await asyncio.sleep(0.01)


@apart
async def test_no_signal_of_an_agent_ends_the_first_process(
    pods: list[PodHere], folder: Path, queue: FakeQueue
) -> None:
    """Nor keeps any it from starting further ones; neither do those that arrive while it forks."""
    code = (
        "import os, time\n"
        "for number in [*range(1, 65)] * 20: os.kill(1, number)\n"
        "time.sleep(0.3); print(open('/proc/1/comm').read())"
    )
    pod = await begun(pods, whole_image(folder), folder, queue, Setup(command=python(code)))
    assert isinstance(pod.container, FirstProcess)
    for _ in range(4):
        ended = await asyncio.gather(*(queue.run(make_lease()) for _ in range(4)))
        assert [one.output for one in ended] == ["launcher\n\n"] * 4
        pod.container.first.send_signal(signal.SIGTERM)  # nor one of the kubelet's, which tells the worker
    assert pod.container.codes == []
    await pod.stop()
    assert await pod.container.ended() == 143


@apart
async def test_no_agent_sets_limits_of_the_first_process(pods: list[PodHere], folder: Path, queue: FakeQueue) -> None:
    """Nor of its guardian, whose user it has; its own, and those that it asks for, are its own affair."""
    code = (
        "import os, resource\n"
        "soft, hard = resource.prlimit(1, resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))\n"
        "for process in (1, os.getppid()):\n"
        "    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS):\n"
        "        try: resource.prlimit(process, limit, (0, 0))\n"
        "        except PermissionError: print('refused')\n"
        "assert resource.prlimit(1, resource.RLIMIT_NOFILE) == (soft, hard)"
    )
    await begun(pods, whole_image(folder), folder, queue, Setup(command=python(code)))
    finish = await queue.run(make_lease())
    assert (finish.exit_code, finish.output, finish.log_tail) == (0, "refused\n" * 6, "refused\n" * 6)


@apart
async def test_the_death_of_the_first_process_takes_every_agent_along(
    pods: list[PodHere], folder: Path, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.SETTLE_SECONDS", 0.02)
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.ALONE_SECONDS", 0.02)
    marker, mark = marked()
    code = f"{mark}import os, time; os.fork() or (os.setsid(), os.fork(), time.sleep(600)); time.sleep(600)"
    pod = await begun(pods, whole_image(folder), folder, queue, Setup(command=python(code)))
    assert isinstance(pod.container, FirstProcess)
    lease = await queue.put(make_lease())
    async with asyncio.timeout(10):
        while len(living(marker)) < 3:  # noqa: ASYNC110 (an agent that waits says nothing to us)
            await asyncio.sleep(0.01)
    pod.container.restarts = False  # another, as another user, would outlive what started it
    pod.container.first.kill()
    assert (await queue.finished(lease)).ended == "signalled"
    await pod.gone(marker)
