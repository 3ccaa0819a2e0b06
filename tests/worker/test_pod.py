"""What holds of a pod besides the contract: who may be taken for the launcher, whose environment agents get, how a pod
ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from kitestring_api import names
from kitestring_rollout.worker.config import Listener, WorkerConfig
from kitestring_rollout.worker.launcher_socket import LOCK_NAME
from kitestring_rollout.worker.main import WorkerMistake
from kitestring_rollout.worker.worker import STILLBORN_IN_A_ROW, Unfit, is_unfit
from tests.worker.conftest import PATH, WorkerHere, living, worker_config
from tests.worker.executor_contract import Setup, marked, python
from tests.worker.fake_queue import FakeQueue, make_lease
from tests.worker.late_gateway import LateGateway
from tests.worker.pod import AGENT_UID, KILLED, Container, PodHere, in_pod, installed_launcher, shared_folder

pytestmark = pytest.mark.usefixtures("settled")

SLEEP = python("import time; print('up', flush=True); time.sleep(600)")


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        yield made


class Pods:
    """Makes pods of one folder and ends them."""

    def __init__(self, folder: Path, queue: FakeQueue, preload: list[str]) -> None:
        self.folder = folder
        self.queue = queue
        self.preload = preload
        self.containers: list[Container] = []
        self.workers: list[WorkerHere] = []
        self.launcher = installed_launcher(folder)

    def config(self, setup: Setup, **fields: Any) -> WorkerConfig:
        config = in_pod(worker_config(self.folder, self.queue.url, setup, self.preload), self.folder)
        agent = config.agent.model_copy(update={"env": setup.env})
        return config.model_copy(update={"agent": agent, **fields})

    def container(self, env: dict[str, str] | None = None) -> Container:
        command = (self.launcher, "--socket", self.folder / "socket" / "launcher.sock")
        self.containers.append(Container(command, {"PATH": PATH, **(env or {})}, self.folder, AGENT_UID))
        return self.containers[-1]

    async def start(self, setup: Setup, env: dict[str, str] | None = None, **fields: Any) -> PodHere:
        pod = PodHere(self.config(setup, **fields), self.container(env))
        self.workers.append(pod)
        await pod.begin()
        return pod

    async def end(self) -> None:
        await self.queue.end()
        for container in self.containers:
            container.restarts = False
        for worker in self.workers:
            await worker.stop()
        for container in self.containers:
            if container.process is not None:
                await container.remove()


StartPod = Callable[..., Coroutine[Any, Any, PodHere]]


@pytest.fixture
async def pods(folder: Path, queue: FakeQueue, preload: list[str]) -> AsyncIterator[Pods]:
    made = Pods(folder, queue, preload)
    yield made
    await made.end()


async def up(queue: FakeQueue, marker: str, count: int = 1) -> None:
    """Until so many processes bear the marker."""
    async with asyncio.timeout(10):
        while len(living(marker)) < count:  # noqa: ASYNC110 (an agent that waits says nothing to us)
            await asyncio.sleep(0.01)


# --- Who is taken for the launcher ----------------------------------------------------------------------------------


async def test_one_launcher_is_taken_and_the_socket_goes(pods: Pods, queue: FakeQueue) -> None:
    """Agents are beside the launcher and see what it sees."""
    path = pods.folder / "socket" / "launcher.sock"
    code = (
        "import errno, os, socket\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        f"print(errno.errorcode[s.connect_ex({str(path)!r})])\n"
        f"print(os.listdir({str(path.parent)!r}))\n"
        f"try: open({str(path.parent / 'mine')!r}, 'w')\nexcept OSError as error: print(error.strerror)\n"
    )
    pod = await pods.start(Setup(command=python(code)))
    finish = await queue.run(make_lease())
    missing, listing, *refused = finish.output.splitlines()
    assert (missing, listing) == ("ENOENT", repr([LOCK_NAME]))
    if AGENT_UID is not None:
        assert refused == ["Permission denied"]
    other = pods.container()
    await other.start()
    assert (await queue.run(make_lease())).ended == "exited"
    await queue.end()
    assert await pod.ended() == 0
    assert await pod.container.ended() == 0
    os.kill(other.pid, signal.SIGTERM)  # it still waits for a worker
    assert await other.ended() == 143


async def test_a_socket_that_others_may_connect_to_but_not_replace(pods: Pods, queue: FakeQueue) -> None:
    worker = WorkerHere(pods.config(Setup(command=["true"])))
    pods.workers.append(worker)
    await worker.begin()
    path = pods.folder / "socket" / "launcher.sock"
    async with asyncio.timeout(10):
        while not path.exists():  # noqa: ASYNC110 (that a worker listens, it says by this alone)
            await asyncio.sleep(0.01)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert path.parent.stat().st_uid == os.getuid()
    assert queue.requests == []  # nothing is leased that nobody could run


async def test_nobody_is_heard_while_agents_of_another_launcher_may_live(
    pods: Pods, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is started again finds the launcher of its forerunner, which is still ending its agents."""
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.LOCK_POLL_SECONDS", 0.001)
    tries, asked = 0, asyncio.Event()
    real = fcntl.flock

    def flock(file: Any, how: int) -> None:
        nonlocal tries
        tries += 1
        if tries == 5:
            asked.set()
        real(file, how)

    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.fcntl.flock", flock)
    (pods.folder / "socket").mkdir()
    with (pods.folder / "socket" / LOCK_NAME).open("w") as file:
        real(file, fcntl.LOCK_EX)
        await pods.start(Setup(command=python("print(1)")))
        await asked.wait()
        assert not (pods.folder / "socket" / "launcher.sock").exists()
    assert (await queue.run(make_lease())).output == "1\n"


async def test_a_launcher_holds_the_lock_for_its_life(pods: Pods, queue: FakeQueue) -> None:
    pod = await pods.start(Setup(command=python("print(1)")))
    await queue.run(make_lease())
    with (pods.folder / "socket" / LOCK_NAME).open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await pod.stop()
        assert await pod.container.ended() == 143
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_another_user_is_not_taken(pods: Pods, queue: FakeQueue, caplog: pytest.LogCaptureFixture) -> None:
    uid = os.getuid() if AGENT_UID is None else AGENT_UID
    pod = await pods.start(Setup(command=["true"]), launcher_uid=uid + 1)
    pod.container.restarts = False
    assert await pod.container.ended() == 3
    assert f"user {uid} came to" in caplog.text
    assert queue.requests == []
    await pod.stop()
    right = await pods.start(Setup(command=["true"]), launcher_uid=uid)
    assert (await queue.run(make_lease())).exit_code == 0
    await right.stop()


async def test_agents_that_ran_when_their_launcher_was_killed_have_failed_and_another_comes(
    pods: Pods, queue: FakeQueue
) -> None:
    """The kernel kills a whole container for the memory that its agents took."""
    marker, mark = marked()
    daemon = "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))\n"
    code = f"{mark}import os, sys, time\nif sys.stdin.read() == 'stay':\n    {daemon}    time.sleep(600)\nprint('well')"
    protocol = {"task": {"from": "stdin", "format": "text", "field": "q"}}
    pod = await pods.start(Setup(command=python(code), protocol=protocol))
    first = [await queue.put(make_lease({"q": "stay"})) for _ in range(2)]
    await up(queue, marker, 4)
    os.kill(pod.container.pid, signal.SIGKILL)
    for lease in first:
        finish = await queue.finished(lease)
        assert (finish.ended, finish.signal, finish.message) == ("signalled", 9, KILLED)
    assert living(marker) == []
    assert (await queue.run(make_lease({"q": "go"}))).output == "well\n"
    assert pod.container.codes == [-signal.SIGKILL]


@pytest.mark.parametrize("returns", [True, False])
async def test_a_lease_that_comes_while_no_launcher_is_there_waits(
    pods: Pods, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.RETURN_SECONDS", 10.0 if returns else 0.1)
    pod = await pods.start(Setup(command=python("print(1)")))
    await queue.run(make_lease())
    pod.container.restarts = False
    async with asyncio.timeout(10):
        while not queue.asking:  # noqa: ASYNC110 (until it waits for the next lease)
            await asyncio.sleep(0.01)
    os.kill(pod.container.pid, signal.SIGKILL)
    await pod.container.ended()
    lease = await queue.put(make_lease(ttl_seconds=0.3))
    if returns:
        await queue.until(lambda: queue.beats.get(lease.lease, 0) >= 2)
        await pods.container().start()
        assert (await queue.finished(lease)).output == "1\n"
    else:
        finish = await queue.finished(lease)
        assert finish.ended == "executorLost"
        assert finish.message == "the container `agent` ended, and its launcher did not come back in time"


REACH = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
ATTACH, DETACH, PIDFD_OPEN, PIDFD_GETFD = 16, 17, 434, 438
pid = os.getppid()
for who in ("guardian", "launcher"):
    for what in ("fd", "mem", "environ", "cwd", "exe"):
        path = f"/proc/{pid}/{what}"
        try:
            os.listdir(path) if what == "fd" else os.readlink(path) if what in ("cwd", "exe") else open(path, "rb")
            print(who, what, "reached")
        except PermissionError:
            pass
    if libc.ptrace(ATTACH, pid, 0, 0) == 0:
        os.waitpid(pid, 0); libc.ptrace(DETACH, pid, 0, 0)
        print(who, "traced")
    handle = libc.syscall(PIDFD_OPEN, pid, 0)
    for fd in range(16):
        if libc.syscall(PIDFD_GETFD, handle, fd, 0) >= 0:
            print(who, "descriptor", fd)
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
print("tried")
"""


@pytest.mark.skipif(AGENT_UID is None, reason="needs to start processes of another user")
@pytest.mark.parametrize("name", ["socket", "bin"])
async def test_folders_that_agents_could_write_to_are_refused(
    pods: Pods, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """In place of the lock, the socket or the program they could put their own."""
    (pods.folder / "socket").mkdir()
    (pods.folder / name).chmod(0o777)
    container = pods.container()
    container.restarts = False
    await container.start()
    assert await container.ended() == 1
    line = f"launcher: {pods.folder / name} can be written to from here: mount it read-only in the container `agent`\n"
    assert capfd.readouterr().err == line


async def test_a_pod_whose_containers_are_all_killed(
    pods: Pods, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its node, without a word: no agent's doing, as its worker knows when that is ended too."""
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.ALONE_SECONDS", 60.0)
    marker, mark = marked()
    pod = await pods.start(Setup(command=python(f"{mark}import time; time.sleep(600)")))
    lease = await queue.put(make_lease())
    await up(queue, marker)
    pod.container.restarts = False
    os.kill(pod.container.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while "the launcher went" not in caplog.text:  # noqa: ASYNC110 (it tells nobody else)
            await asyncio.sleep(0.01)
    await pod.stop()
    assert (await queue.finished(lease)).ended == "executorLost"


@pytest.mark.skipif(os.getuid() == 0 and AGENT_UID is None, reason="root reaches everything")
@pytest.mark.parametrize("preload", [[], ["decimal"]], ids=["executed", "forked"])
async def test_an_agent_reaches_no_descriptor_of_those_that_watch_it(pods: Pods, queue: FakeQueue) -> None:
    await pods.start(Setup(command=python(REACH)))
    finish = await queue.run(make_lease())
    assert finish.log_tail == "tried\n"


# --- What an agent gets ---------------------------------------------------------------------------------------------

SHOW = "import json, os; print(json.dumps({k: os.fsencode(v).decode('latin-1') for k, v in os.environ.items()}))"


@pytest.mark.parametrize("preload", [[], ["decimal"]], ids=["executed", "forked"])
@pytest.mark.parametrize(("of_container", "of_agent"), [(0, 500), (990, 1000)])
async def test_an_agent_goes_first_when_memory_runs_out(
    pods: Pods, queue: FakeQueue, of_container: int, of_agent: int
) -> None:
    """Kubernetes gives a pod with a small request nearly the highest score, and refuses to have it lowered."""
    pod = PodHere(
        pods.config(Setup(command=python("print(open('/proc/self/oom_score_adj').read())"))), pods.container()
    )
    shell = f'echo {of_container} > /proc/self/oom_score_adj; exec "$@"'
    pod.container._command = ("sh", "-c", shell, "sh", *map(str, pod.container._command))
    pods.workers.append(pod)
    await pod.begin()
    assert (await queue.run(make_lease())).output.strip() == str(of_agent)


@pytest.mark.parametrize("preload", [[], ["decimal"]], ids=["executed", "forked"])
async def test_the_containers_environment_lies_below_ours(pods: Pods, queue: FakeQueue) -> None:
    of_container = {
        "SECRET": "s3cret",
        "BOTH": "container",
        "BYTES": os.fsdecode(b"\xff\xfe"),
        "LANG": "C",
        "HOME": "/root",
        "OTEL_SERVICE_NAME": "mine",
        "OPENAI_API_KEY": "sk-mine",
        "KITESTRING_TASK": "forged",
        "KITESTRING_OTHER": "forged",
    }
    await pods.start(Setup(command=python(SHOW), env={"BOTH": "pool", "MINE": "a b"}), of_container)
    lease = make_lease()
    got = json.loads((await queue.run(lease)).output)
    assert (got["SECRET"], got["BOTH"], got["MINE"], got["LANG"]) == ("s3cret", "pool", "a b", "C")
    assert got["BYTES"] == "\xff\xfe"
    assert got["PATH"] == PATH
    assert got["OTEL_SERVICE_NAME"] == "mine"
    assert got["OPENAI_API_KEY"] == lease.token
    assert got["HOME"].startswith(str(pods.folder / "scratch"))
    assert not {"KITESTRING_TASK", "KITESTRING_OTHER"} & set(got)


async def test_what_nothing_says_has_defaults(pods: Pods, queue: FakeQueue) -> None:
    pod = PodHere(pods.config(Setup(command=["/usr/bin/env"])), pods.container())
    pod.container._env = {}
    pods.workers.append(pod)
    await pod.begin()
    lines = (await queue.run(make_lease())).output.splitlines()
    assert "LANG=C.UTF-8" in lines
    assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in lines
    assert "OTEL_SERVICE_NAME=agent" in lines


async def test_programs_are_looked_up_in_the_container(pods: Pods, queue: FakeQueue) -> None:
    tool = pods.folder / "bin" / "tool-of-the-image"
    tool.write_text("#!/bin/sh\npwd\n")
    tool.chmod(0o755)
    await pods.start(Setup(command=["tool-of-the-image"]), {"PATH": f"{tool.parent}:/usr/bin:/bin"})
    assert (await queue.run(make_lease())).output == f"{pods.folder}\n"  # the container's folder, not the scratch's


async def test_an_agent_that_is_not_there(pods: Pods, queue: FakeQueue) -> None:
    await pods.start(Setup(command=["no-such-tool"]), {"PATH": "/opt/bin:/bin"})
    finish = await queue.run(make_lease())
    assert (finish.ended, finish.message) == (
        "startFailed",
        "command no-such-tool: not found in PATH=/opt/bin:/bin; "
        "correct `command` of the container `agent`, or install it",
    )


async def test_scratch_of_a_launcher_before_is_removed(pods: Pods, queue: FakeQueue) -> None:
    scratch = pods.folder / "scratch"
    old = scratch / "kitestring-old"
    (old / "deep").mkdir(parents=True)
    (old / "deep" / "file").write_text("x")
    (scratch / "kept").write_text("x")
    (scratch / "kitestring-link").symlink_to(scratch)
    if AGENT_UID is not None:
        for path in [old, old / "deep", old / "deep" / "file"]:
            os.chown(path, AGENT_UID, AGENT_UID)
    (old / "deep").chmod(0)
    await pods.start(Setup(command=["ls", str(scratch)]))
    kept, own = sorted((await queue.run(make_lease())).output.splitlines())
    assert kept == "kept"
    assert own.startswith("kitestring-") and own not in ("kitestring-old", "kitestring-link")


MEDDLE = """
import os, pathlib, shutil
home = pathlib.Path.home()
root = home.parent
def attempt(what, *args):
    try: what(*args)
    except OSError: pass
for path in root.iterdir():
    attempt(shutil.rmtree, path)
attempt(root.chmod, 0)
attempt(root.rename, root.with_name('elsewhere'))
raise SystemExit(7)
"""


@pytest.mark.parametrize("preload", [[], ["decimal"]], ids=["executed", "forked"])
@pytest.mark.parametrize("owner", ["node", "agent"])
async def test_no_agent_bars_the_next_from_its_folder(pods: Pods, queue: FakeQueue, owner: str) -> None:
    """An emptyDir is the node's, and open to all; a volume of the user's may be the agents'."""
    scratch = pods.folder / "scratch"
    if owner == "node":
        os.chown(scratch, os.getuid(), os.getgid())
        scratch.chmod(0o777)
    await pods.start(Setup(command=python(MEDDLE), capacity=1))
    for _ in range(2):
        finish = await queue.run(make_lease())
        assert (finish.ended, finish.exit_code) == ("exited", 7), (finish.message, finish.log_tail)


@pytest.mark.parametrize(
    ("at", "unfit"),
    [([], False), ([0.0, 20.0], False), ([0.0, 0.1, 0.2], False), ([0.0, 4.0, 9.9], False), ([0.0, 4.0, 10.0], True)],
)
def test_a_shortage_of_moments_makes_no_worker_unfit(at: list[float], unfit: bool) -> None:
    assert is_unfit(at) is unfit


async def test_a_worker_beside_which_no_agent_can_be_made_ready_ends(
    pods: Pods, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail each at once, and so draw most of those that wait. What runs may end before."""
    monkeypatch.setattr("kitestring_rollout.worker.worker.STILLBORN_SECONDS", 0.0)
    monkeypatch.setattr("kitestring_rollout.worker.worker.STILLBORN_PAUSE", 0.0)
    scratch, go = pods.folder / "scratch" / "inner", pods.folder / "go"
    os.mkfifo(go, 0o666)
    go.chmod(0o666)
    code = (
        "import os, sys\n"
        f"if sys.stdin.read() == 'wait': print(open({str(go)!r}).read())\n"
        f"else: os.rename({str(scratch)!r}, {str(scratch)!r} + '-'); open({str(scratch)!r}, 'w')"
    )
    protocol = {"task": {"from": "stdin", "format": "text", "field": "q"}}
    setup = Setup(command=python(code), protocol=protocol, capacity=2)
    pod = await pods.start(setup, scratch_root=scratch)
    waiting = await queue.put(make_lease({"q": "wait"}))
    with await asyncio.to_thread(go.open, "w") as told:  # it is there
        assert (await queue.run(make_lease({"q": "bar"}))).exit_code == 0
        for _ in range(STILLBORN_IN_A_ROW):
            finish = await queue.run(make_lease({"q": ""}))
            assert (finish.ended, finish.message) == ("executorLost", f"mkdir {scratch}: not a directory")
        told.write("well")
    assert (await queue.finished(waiting)).output == "well\n"
    with pytest.raises(Unfit, match=f"3 agents in a row could not be made ready: mkdir {scratch}: not a directory"):
        await pod.ended()
    pods.workers.remove(pod)
    assert await pod.container.ended() == 143


async def test_scratch_that_cannot_be_made(pods: Pods, queue: FakeQueue) -> None:
    await pods.start(Setup(command=["true"]), scratch_root=Path("/proc/scratch"))
    for _ in range(2):
        finish = await queue.run(make_lease())
        assert finish.ended == "startFailed"
        assert finish.message == (
            "scratch_root: mkdir /proc/scratch: no such file or directory; "
            "mount a writable volume there in the container `agent`"
        )


# --- Its network ----------------------------------------------------------------------------------------------------

ASK = python("import os, urllib.request\nurllib.request.urlopen(os.environ['KITESTRING_BASE_URL']).read()")


async def test_the_first_agent_waits_for_the_way_to_its_gateway(pods: Pods, queue: FakeQueue) -> None:
    await pods.start(Setup(command=ASK))
    async with LateGateway(cuts=2).open() as gateway:
        finish = await queue.run(make_lease(base_url=gateway.base_url))
        assert (finish.ended, finish.exit_code) == ("exited", 0), finish.log_tail
        assert gateway.connections == 4  # the agent's is the last
        assert (await queue.run(make_lease(base_url=gateway.base_url))).exit_code == 0
        assert gateway.connections == 5, "asked once"


async def test_an_agent_whose_gateway_never_answers_is_not_started(
    pods: Pods, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kitestring_rollout.worker.gateway_check.WAIT_SECONDS", 0.5)
    ran = pods.folder / "scratch" / "ran"
    await pods.start(Setup(command=["touch", str(ran)]))
    finish = await queue.run(make_lease(base_url="http://gateway.invalid:8080/r/token"))
    assert finish.ended == "cutOff"
    assert (finish.message or "").startswith("http://gateway.invalid:8080 cannot be reached from the agent's side: ")
    assert not ran.exists()
    assert (await queue.run(make_lease())).exit_code == 0, "of another gateway nothing is said"


async def test_a_pod_that_waits_for_a_gateway_ends_at_once(pods: Pods, queue: FakeQueue) -> None:
    async with LateGateway(cuts=1 << 30).open() as gateway:
        pod = await pods.start(Setup(command=["true"]))
        await queue.put(make_lease(base_url=gateway.base_url, ttl_seconds=0.3))
        await gateway.asked.wait()
        begun = time.monotonic()
        await queue.end()
        assert await pod.ended() == 0
        assert time.monotonic() - begun < 10


# --- Python agents --------------------------------------------------------------------------------------------------


class TestPreloaded:
    @pytest.fixture
    def preload(self) -> list[str]:
        return ["decimal"]

    async def test_a_program_is_forked_in_the_containers_interpreter(self, pods: Pods, queue: FakeQueue) -> None:
        agent = pods.folder / "agent.py"
        agent.write_text("import os, sys\nprint('decimal' in sys.modules, sys.argv, os.getcwd())\n")
        await pods.start(Setup(command=["python3", "agent.py"], args=["a b"]))
        for _ in range(3):
            assert (await queue.run(make_lease())).output == f"True ['agent.py', 'a b'] {pods.folder}\n"

    async def test_a_module_that_is_not_there(self, pods: Pods, queue: FakeQueue, preload: list[str]) -> None:
        preload[:] = ["decimal_"]
        pod = await pods.start(Setup(command=["python3", "agent.py"]))
        for _ in range(2):
            finish = await queue.run(make_lease())
            assert (finish.ended, finish.message) == (
                "startFailed",
                "agentProtocol.preload: python3 cannot import decimal_: ModuleNotFoundError: No module named "
                "'decimal_'; install it for that interpreter, or remove it from preload",
            )
        await queue.end()
        assert await pod.container.ended() == 0

    async def test_an_interpreter_that_is_not_there(self, pods: Pods, queue: FakeQueue) -> None:
        await pods.start(Setup(command=["python3.99", "agent.py"]), {"PATH": "/bin"})
        finish = await queue.run(make_lease())
        assert (finish.ended, finish.message) == (
            "startFailed",
            "agentProtocol.preload: python3.99: No such file or directory (PATH=/bin); "
            "correct the first word of `command`",
        )

    async def test_a_command_that_cannot_be_forked(self, pods: Pods, queue: FakeQueue) -> None:
        await pods.start(Setup(command=["node", "agent.js"]))
        finish = await queue.run(make_lease())
        assert finish.ended == "startFailed"
        assert "starts with a Python interpreter, found 'node'" in (finish.message or "")

    async def test_an_interpreter_that_dies_takes_the_container_along(self, pods: Pods, queue: FakeQueue) -> None:
        """The agents that ran are to blame: they can reach it, and the modules in it are theirs."""
        marker, mark = marked()
        pod = await pods.start(Setup(command=python(f"{mark}import time; time.sleep(600)")))
        lease = await queue.put(make_lease())
        await up(queue, marker)
        (interpreter,) = psutil.Process(pod.container.pid).children()
        interpreter.kill()
        finish = await queue.finished(lease)
        assert (finish.ended, finish.message) == (
            "signalled",
            "the process that guards the agent died while it ran: the agent's own doing",
        )
        await pod.gone(marker)
        second = await queue.put(make_lease(ttl_seconds=0.3))
        await up(queue, marker)
        queue.cancelled.add(second.lease)
        await pod.stop()
        assert pod.container.codes[0] == 1

    async def test_a_drain(self, pods: Pods, queue: FakeQueue) -> None:
        await drained(pods, queue)


# --- How a pod ends -------------------------------------------------------------------------------------------------


def tell_to_end(pod: PodHere) -> None:
    """As a kubelet does when the pod is to end: SIGTERM to the container, and to the worker by its preStop."""
    os.kill(pod.container.pid, signal.SIGTERM)
    pod.stopping.set()


async def drained(pods: Pods, queue: FakeQueue) -> None:
    go = pods.folder / "go"
    os.mkfifo(go, 0o666)
    go.chmod(0o666)
    marker, mark = marked()
    pod = await pods.start(Setup(command=python(f"{mark}print(open({str(go)!r}).read())"), capacity=2))
    lease = await queue.put(make_lease())
    await up(queue, marker)
    async with asyncio.timeout(10):
        while not queue.asking:  # noqa: ASYNC110 (until its next request has arrived)
            await asyncio.sleep(0.01)
    tell_to_end(pod)
    async with asyncio.timeout(10):
        while queue.asking:  # noqa: ASYNC110 (nobody says when a request was given up)
            await asyncio.sleep(0.01)
    waiting = await queue.put(make_lease())
    await asyncio.to_thread(go.write_text, "well")
    assert (await queue.finished(lease)).output == "well\n"
    assert await pod.container.ended() == 143
    assert await pod.ended() == 0
    assert waiting.lease not in queue.leased


async def test_a_drain_lets_agents_finish_and_leases_nothing(pods: Pods, queue: FakeQueue) -> None:
    await drained(pods, queue)


async def test_a_drain_ends_agents_that_take_too_long(pods: Pods, queue: FakeQueue) -> None:
    marker, mark = marked()
    pod = await pods.start(Setup(command=python(f"{mark}import time; time.sleep(600)"), drain_seconds=0.1))
    lease = await queue.put(make_lease())
    await up(queue, marker)
    tell_to_end(pod)
    assert (await queue.finished(lease)).ended == "cancelled"
    assert await pod.container.ended() == 143
    assert await pod.ended() == 0


async def test_a_worker_that_is_told_to_end_does_not_complete_the_pod(pods: Pods, queue: FakeQueue) -> None:
    pod = await pods.start(Setup(command=["true"]))
    await queue.run(make_lease())
    await pod.stop()
    assert await pod.container.ended() == 143


async def test_the_end_of_the_run_completes_the_pod(pods: Pods, queue: FakeQueue) -> None:
    pod = await pods.start(Setup(command=["true"]))
    await queue.run(make_lease())
    await queue.end()
    assert await pod.ended() == 0
    assert await pod.container.ended() == 0


async def test_a_refused_worker_does_not_complete_the_pod(pods: Pods, queue: FakeQueue) -> None:
    config = pods.config(Setup(command=["true"]))
    (pods.folder / "credential").write_text("wrong")
    pod = PodHere(config, pods.container())
    pod.container.restarts = False
    await pod.begin()
    with pytest.raises(WorkerMistake):
        await pod.ended()
    assert await pod.container.ended() == 143


async def test_a_worker_of_one_rollout(pods: Pods, queue: FakeQueue) -> None:
    pod = await pods.start(Setup(command=python("print(1)"), capacity=1), rollout="t000001-00000000-000")
    first, second = [await queue.put(make_lease()) for _ in range(2)]
    assert (await queue.finished(first)).output == "1\n"
    assert await pod.ended() == 0
    assert await pod.container.ended() == 0
    assert second.lease not in queue.leased
    assert {request.rollout for request in queue.requests} == {"t000001-00000000-000"}


async def test_of_a_container_that_was_lost_its_pod_says_more(pods: Pods, queue: FakeQueue) -> None:
    """With one rollout per pod: the kernel may have ended it for its memory, which is the agent's doing."""
    marker, mark = marked()
    setup = Setup(command=python(f"{mark}import time; time.sleep(600)"), capacity=1)
    pod = await pods.start(setup, rollout="t000001-00000000-000")
    lease = await queue.put(make_lease())
    await up(queue, marker)
    pod.container.restarts = False
    os.kill(pod.container.pid, signal.SIGKILL)
    assert await pod.ended() == 0
    assert lease.lease not in queue.finishes
    assert len(queue.requests) == 1
    assert living(marker) == []


async def test_a_pods_agent_that_ends_its_guardian_has_failed(pods: Pods, queue: FakeQueue) -> None:
    """The launcher lives on, so this is no loss of the container."""
    setup = Setup(command=["sh", "-c", "kill -9 $PPID; exec sleep 600"], capacity=1)
    pod = await pods.start(setup, rollout="t000001-00000000-000")
    assert (await queue.run(make_lease())).ended == "signalled"
    assert await pod.ended() == 0


@pytest.mark.parametrize("how", ["missing", "ended"])
async def test_a_rollout_that_is_not_to_be_had(pods: Pods, queue: FakeQueue, how: str) -> None:
    setattr(queue, how, True)
    pod = await pods.start(Setup(command=["true"], capacity=1), rollout="t000001-00000000-000")
    assert await pod.ended() == 0
    assert await pod.container.ended() == 0


async def test_health(pods: Pods, queue: FakeQueue) -> None:
    config = pods.config(Setup(command=python("print(1)")), health=Listener())
    worker = WorkerHere(config)
    pods.workers.append(worker)
    await worker.begin()
    url = worker.urls["health"] + names.ROUTE_HEALTH
    async with aiohttp.ClientSession() as session:

        async def state() -> tuple[int, dict[str, bool]]:
            async with session.get(url) as reply:
                return reply.status, await reply.json()

        async def becomes(launcher: bool, reached: bool) -> None:
            async with asyncio.timeout(10):
                expected = {"launcher": launcher, "queue": reached}
                while (found := await state())[1] != expected:  # noqa: ASYNC110 (as a kubelet does)
                    await asyncio.sleep(0.01)
            assert found[0] == (200 if launcher and reached else 503)

        await becomes(launcher=False, reached=False)
        container = pods.container()
        await container.start()
        await becomes(launcher=True, reached=True)
        await queue.stop()
        await becomes(launcher=True, reached=False)
        await queue.start()
        await becomes(launcher=True, reached=True)
        container.restarts = False
        os.kill(container.pid, signal.SIGKILL)
        await becomes(launcher=False, reached=True)


def test_one_rollout_is_a_capacity_of_one(tmp_path: Path) -> None:
    config = worker_config(tmp_path, "http://127.0.0.1:1", Setup(command=["true"], capacity=2), [])
    with pytest.raises(ValueError, match="capacity is 2, but a worker with `rollout` runs that one alone: set 1"):
        WorkerConfig.model_validate({**config.model_dump(by_alias=True), "rollout": "r"})


async def test_a_socket_that_cannot_be(pods: Pods) -> None:
    config = pods.config(Setup(command=["true"])).model_copy(update={"launcher_socket": Path("/proc/x/launcher.sock")})
    with pytest.raises(WorkerMistake, match=r"launcher_socket: cannot listen at /proc/x/launcher\.sock: No such file"):
        await WorkerHere(config).ended()
