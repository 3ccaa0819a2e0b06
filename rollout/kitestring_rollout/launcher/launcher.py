"""The launcher: starts agents, and ends every process that one of them leaves behind.

One file, standard library only, Python 3.8 or newer, so that it runs in the agent's own interpreter. It holds no
credential of the worker, only what the agents get anyway.

    worker ──control socket (its fd 0)──► launcher ──fork──► guardian (one per attempt) ──fork──► agent
       └───────────────one channel per attempt──────────────────►┘

The launcher imports the modules to preload once and forks a guardian for each channel that it receives. The guardian is
a child subreaper: whatever the agent starts, also what it double-forks or puts into a session of its own, stays below
the guardian, so that "no child is left" (ECHILD) proves that no process of the agent is. The guardian makes the scratch
folder, drains and bounds the output, holds the deadline, and reports the end. When its channel closes (the worker is
gone, kill -9 included) it kills everything and goes. An orphan of a guardian that was itself killed falls to the
launcher, a subreaper too, which kills it.

With a Python program in the plan the agent is not executed but forked: the unmodified script runs as `__main__` on top
of the preloaded modules, with its own arguments, environment, folder, session and limits, and ends as under `python`.
"""

# pathlib and contextlib cost start time and memory of every guardian here; `exec` is what the file is for.
# ruff: noqa: PTH100, PTH101, PTH102, PTH103, PTH106, PTH108, PTH109, PTH110, PTH112, PTH115, PTH116, PTH120, PTH123, PTH208
# ruff: noqa: S102, SIM105
from __future__ import annotations

import atexit
import builtins
import codecs
import ctypes
import errno
import gc
import importlib
import importlib.machinery
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
import types
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals blocked in launcher and guardians, which end with the worker and not before their agents. Not ignored: one
that is sent to an agent just forked must wait until the agent is ready to die of it."""
CHUNK = 65536
SAMPLE_SECONDS = 1.0
UNKILLABLE_SECONDS = 10.0
"""A process that outlives SIGKILL for so long hangs in the kernel: it is reported, not waited for."""


class Plan(NamedTuple):
    """What the worker says first, once: the program to fork, or none when agents are executed."""

    preload: list[str]
    program: list[str] | None
    """["script", path], ["module", name] or ["code", text]."""
    sealed: bool = False
    """Keeps other processes of the user, which are agents, from this one's memory and descriptors."""


class AgentStart(NamedTuple):
    """What the worker says on a channel: one agent to run. Texts, paths, seconds, bytes."""

    argv: list[str]
    """As the agent sees it; with a program in the plan without interpreter and options, as in `sys.argv`."""
    env: dict[str, str]
    cwd: str
    """Empty: the folder in which the launcher was started."""
    scratch: str
    """Folder made for this attempt (0700) and removed after it; must not exist yet."""
    folders: list[str]
    files: dict[str, str]
    """Absolute path below scratch → content; written with mode 0600."""
    stdin: str | None
    """Content of standard input; None: /dev/null."""
    output_file: str | None
    """Read back as the output; None: standard output is."""
    output_bytes: int
    log_bytes: int
    seconds: float
    grace_seconds: float
    """Between TERM and KILL."""
    processes: int | None
    process_headroom: int | None
    """Backstop against fork bombs: RLIMIT_NPROC is so many above what the user runs at the start. None in a cluster,
    where other pods of the machine have the same user, whose processes count but cannot be seen."""
    rlimits: dict[str, int]
    """Name after `RLIMIT_` → soft and hard limit of each process of the agent."""
    defaults: dict[str, str] | None = None
    """None: `env` is the whole environment. Otherwise it lies over the launcher's own, and that over these."""


class AgentEnd(NamedTuple):
    """What the guardian says last: no process of the agent is left, its folder is gone."""

    ended: str
    """exited, signalled, deadline, cancelled, startFailed or executorLost."""
    exit_code: int | None
    signal: int | None
    message: str | None
    output: str
    output_truncated: bool
    log_tail: str
    log_bytes: int
    seconds: float


# --- Messages on a channel: four bytes of length, then JSON ---------------------------------------------------------


def write_frame(channel: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message; BrokenPipeError or ConnectionResetError when the other side is gone."""
    data = json.dumps(message).encode()
    channel.sendall(struct.pack("!I", len(data)) + data)


def read_frame(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the other side is gone."""
    header = _read_exactly(channel, 4)
    data = _read_exactly(channel, struct.unpack("!I", header)[0]) if header else b""
    return json.loads(data) if data else None


def _read_exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(size - len(parts), 1 << 20))
        except ConnectionResetError:
            return b""
        if not part:
            return b""
        parts += part
    return bytes(parts)


# --- Processes ------------------------------------------------------------------------------------------------------


LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _stat_fields(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and number of threads of a process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[1]), int(fields[17])


def process_table() -> dict[int, tuple[str, int, int]]:
    """Every process: id → (state letter, parent, threads)."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if fields is not None:
                table[int(name)] = fields
    return table


def living_below(root: int, spare: set[int]) -> dict[int, int]:
    """The descendants of `root` that are no zombies: id → threads. `spare` and what is below it are left out."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: dict[int, int] = {}
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        if pid not in spare:
            if table[pid][0] != "Z":
                found[pid] = table[pid][2]
            waiting.extend(children.get(pid, ()))
    return found


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # ended meanwhile: what was wanted
    except PermissionError:
        sys.stderr.write(f"launcher: process {pid} runs as another user and cannot be ended\n")


def kill_tree(root: int, spare: set[int]) -> None:
    """SIGKILL to everything below `root`; not to the processes in `spare` nor to what is below them.

    All are stopped first: a stopped process forks no more, so that a fork bomb cannot outrun the killing.
    """
    stopped: set[int] = set()
    alive = set(living_below(root, spare))
    while not alive <= stopped:
        for pid in alive - stopped:
            _send(pid, signal.SIGSTOP)
        stopped |= alive
        alive = set(living_below(root, spare))
    for pid in alive:
        _send(pid, signal.SIGKILL)


def reap() -> list[tuple[int, int]]:
    """Collects the children that have ended: (process id, wait status)."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def has_children() -> bool:
    """False proves, in a subreaper, that no descendant lives."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def tasks_of_user() -> int:
    """Threads that run as this user now: what RLIMIT_NPROC counts."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                owner = os.stat(f"/proc/{name}").st_uid
            except FileNotFoundError:
                continue
            fields = _stat_fields(int(name)) if owner == os.getuid() else None
            total += fields[2] if fields else 0
    return total


class ChildSignal:
    """A descriptor that becomes readable when a child ends (SIGCHLD)."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for fd in (self.fd, self._write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def clear(self) -> None:
        try:
            os.read(self.fd, CHUNK)
        except BlockingIOError:
            pass


def open_descriptors() -> dict[int, int]:
    """Descriptor → file mode of what is open now."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.fstat(int(name)).st_mode
        except OSError:
            pass  # the descriptor of the listing itself
    return found


def close_all_but(keep: set[int]) -> None:
    """Closes every descriptor of this process from 3 upwards that is not in `keep`."""
    for fd in open_descriptors():
        if fd > 2 and fd not in keep:
            os.close(fd)


# --- Scratch folder -------------------------------------------------------------------------------------------------


def enterable(folder: str) -> None:
    """Makes a folder where there is none, and gives its owner, if that is us, every right to it: an agent before may
    have removed it or taken the rights. The mount of a pod it cannot touch."""
    os.makedirs(folder, 0o700, exist_ok=True)
    about = os.stat(folder)
    if about.st_uid == os.geteuid() and about.st_mode & 0o700 != 0o700:
        os.chmod(folder, stat.S_IMODE(about.st_mode) | 0o700)


def remove_tree(folder: str) -> None:
    """Removes a folder whatever an agent left in it: folders without rights, links, nesting deeper than any path.

    Subfolders of a subfolder are moved up one level and taken in turn: neither recursion nor long paths are needed.
    """
    os.chmod(folder, 0o700)
    top = _open_folder(folder, None)
    moved = 0
    try:
        while True:
            entries = _entries(top)
            if not entries:
                break
            for name, is_folder in entries:
                if not is_folder:
                    os.unlink(name, dir_fd=top)
                    continue
                os.chmod(name, 0o700, dir_fd=top)
                inner = _open_folder(name, top)
                try:
                    for below, is_folder_too in _entries(inner):
                        if is_folder_too:
                            os.chmod(below, 0o700, dir_fd=inner)
                            os.rename(below, f".moved-{os.getpid()}-{moved}", src_dir_fd=inner, dst_dir_fd=top)
                            moved += 1
                        else:
                            os.unlink(below, dir_fd=inner)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _open_folder(name: str, parent: int | None) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def _entries(folder: int) -> list[tuple[str, bool]]:
    """(name, whether a folder) of what lies in an open folder."""
    with os.scandir(folder) as listing:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing]


def write_private(path: str, content: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content.encode())


def read_bounded(path: str, size: int) -> tuple[bytes, bool]:
    """The first `size` bytes of a regular file and whether there are more; nothing when there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", False
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return b"", False
    with os.fdopen(fd, "rb") as file:
        data = file.read(size + 1)
    return data[:size], len(data) > size


def text_of(data: bytes, cut: bool) -> str:
    """UTF-8 as far as it is; when `cut`, a character that is not whole at the end is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)


# --- Guardian -------------------------------------------------------------------------------------------------------


class Capture:
    """What comes out of the agent: counted, its head kept as output, its tail as log, the rest forgotten."""

    def __init__(self, output_bytes: int, log_bytes: int) -> None:
        self.output_bytes = output_bytes
        self.log_bytes = log_bytes
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0
        self.cut = False

    def take(self, data: bytes, is_output: bool) -> None:
        self.total += len(data)
        if is_output:
            room = self.output_bytes - len(self.head)
            self.head += data[:room]
            self.cut = self.cut or len(data) > room
        self.tail += data
        if len(self.tail) > 2 * self.log_bytes:
            del self.tail[: len(self.tail) - self.log_bytes]

    def log(self) -> bytes:
        return bytes(self.tail[max(0, len(self.tail) - self.log_bytes) :])


class Guardian:
    """Runs one agent in this process's care. `launch` returns in the agent, `watch` in the guardian."""

    def __init__(self, channel: socket.socket, start: AgentStart, program: list[str] | None) -> None:
        self.channel = channel
        self.start = start
        self.program = program
        self.capture = Capture(start.output_bytes, start.log_bytes)
        self.children = ChildSignal()
        self.begun = time.monotonic()
        self.pid = 0
        self.status: int | None = None
        self.ending: str | None = None
        self.message: str | None = None
        self.stdout = self.stderr = self.failure = -1

    def launch(self) -> bool:
        """Forks the agent. True in the agent when it is to run a Python program; the guardian goes on with False."""
        stdin = self._prepare()
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.failure, failure = os.pipe()
        for fd in (self.stdout, self.stderr):
            os.set_blocking(fd, False)
        parent = os.getpid()
        self.report({"event": "launching", "guardian": parent})  # from here on it is within reach of the agent
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become_agent(parent, (stdin, out, err), failure)
            except BaseException as error:  # noqa: BLE001 (a process boundary: the guardian reports it)
                os.write(failure, start_failure(error, self.start).encode("utf-8", "replace")[:4000])
                os._exit(127)
            return True
        for fd in (stdin, out, err, failure):
            os.close(fd)
        return False

    def _prepare(self) -> int:
        """Makes the scratch folder and returns a descriptor to be the agent's standard input."""
        start = self.start
        enterable(os.path.dirname(start.scratch))
        os.mkdir(start.scratch, 0o700)
        for folder in start.folders:
            os.mkdir(folder, 0o700)
        for path, content in start.files.items():
            write_private(path, content)
        if start.stdin is None:
            return os.open("/dev/null", os.O_RDONLY)
        # A file, not a pipe: an agent that never reads a task of many megabytes blocks nobody.
        path = start.scratch + "/.stdin"
        write_private(path, start.stdin)
        fd = os.open(path, os.O_RDONLY)
        os.unlink(path)
        return fd

    def _become_agent(self, parent: int, standard: tuple[int, int, int], failure: int) -> None:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        signal.set_wakeup_fd(-1)
        # SIGRTMIN is ignored by the static launcher, which may have started this one
        for number in (*HELD_BACK, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGRTMIN):
            signal.signal(number, signal.SIG_DFL)
        if self.program is not None:  # what the interpreter does at its start
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.channel.detach()
        prctl(PR_SET_DUMPABLE, 1)
        for target, fd in enumerate(standard):
            os.dup2(fd, target)
        close_all_but({failure} | KEPT_OPEN)
        with open("/proc/self/oom_score_adj", "r+") as file:
            # When memory runs out the agent goes before the parts that watch it. Raised from what the container has:
            # most pods have nearly the highest, and to lower it is refused.
            file.write(str(min(1000, int(file.read()) + 500)))
        for name, value in self.start.rlimits.items():
            kind = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))
        if self.start.cwd:
            os.chdir(self.start.cwd)
        if self.program is None:
            os.execvpe(self.start.argv[0], self.start.argv, self.start.env)  # noqa: S606 (no shell is what we want)
        os.environ.clear()
        os.environ.update(self.start.env)
        os.close(failure)

    def watch(self) -> AgentEnd:  # noqa: PLR0912 (one branch per descriptor)
        """Waits for the end of the agent, by itself or by us; returns when none of its processes is left."""
        poll = select.poll()
        for fd in (self.children.fd, self.channel.fileno(), self.failure, self.stdout, self.stderr):
            poll.register(fd, select.POLLIN)
        due = {"term": self.begun + self.start.seconds}
        if self.start.processes is not None:
            due["count"] = self.begun
        while self.status is None and self.ending != "executorLost":
            wait = min(due.values()) - time.monotonic() if due else None
            for fd, _ in poll.poll(None if wait is None else max(0.0, wait) * 1000 + 1):
                if fd == self.children.fd:
                    self.children.clear()
                    self._reap()
                elif fd == self.failure:
                    poll.unregister(fd)
                    self._started()
                elif fd == self.channel.fileno():
                    command = read_frame(self.channel)
                    if command is None:
                        poll.unregister(fd)
                    self.ending = self.ending or "cancelled"
                    due["kill" if command is None or command["do"] == "kill" else "term"] = time.monotonic()
                elif not self._drain(fd):
                    poll.unregister(fd)
            for what in [what for what, at in due.items() if at <= time.monotonic()]:
                del due[what]
                due.update(self._act(what))
        seconds = time.monotonic() - self.begun
        if self.failure >= 0:
            self._started()
        self._end_descendants()
        for fd in (self.stdout, self.stderr):
            while self._drain(fd, to_end=True):
                pass
        return self._end(seconds)

    def _act(self, what: str) -> dict[str, float]:
        """Does what is due; returns what is due next, and when."""
        now = time.monotonic()
        if what == "term":
            self.ending = self.ending or "deadline"
            self._signal_agent(signal.SIGTERM)
            return {"kill": now + self.start.grace_seconds}
        if what == "kill":
            self._signal_agent(signal.SIGKILL)
            return {"lost": now + UNKILLABLE_SECONDS}
        if what == "lost":
            self._lost()
            return {}
        count = sum(living_below(os.getpid(), set()).values())
        limit = self.start.processes
        if limit is not None and count > limit:
            self.message = f"ended: the agent ran {count} processes and threads, limits.processes allows {limit}"
            kill_tree(os.getpid(), set())
        return {"count": now + SAMPLE_SECONDS}

    def _started(self) -> None:
        problem = os.read(self.failure, CHUNK)
        os.close(self.failure)
        self.failure = -1
        if problem:
            self.ending, self.message = "startFailed", problem.decode("utf-8", "replace")
        else:
            self.report({"event": "started", "monotonic": time.monotonic()})

    def report(self, message: dict[str, Any]) -> None:
        try:
            write_frame(self.channel, message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone: what is still to be read from the channel says so

    def _reap(self) -> None:
        for pid, status in reap():
            if pid == self.pid:
                self.status = status

    def _drain(self, fd: int, to_end: bool = False) -> bool:
        """Reads once; False when nothing more can come (with `to_end`: when nothing more is there)."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return not to_end
        self.capture.take(data, is_output=fd == self.stdout and self.start.output_file is None)
        return bool(data)

    def _signal_agent(self, number: int) -> None:
        """To the agent's process group, or to the agent alone while it has not made the group yet."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            _send(self.pid, number)

    def _lost(self) -> None:
        self.ending, self.message = "executorLost", "a process of the agent outlived SIGKILL: it hangs in the kernel"

    def _end_descendants(self) -> None:
        """Kills what the agent left, until nothing is."""
        give_up = time.monotonic() + UNKILLABLE_SECONDS
        pause = 0.0005
        self._reap()
        while has_children() and self.ending != "executorLost":
            kill_tree(os.getpid(), set())
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            self._reap()
            if time.monotonic() > give_up:
                self._lost()

    def _end(self, seconds: float) -> AgentEnd:
        start = self.start
        exited = self.status is not None and os.WIFEXITED(self.status)
        signalled = self.status is not None and os.WIFSIGNALED(self.status)
        if start.output_file is None:
            output, cut = bytes(self.capture.head), self.capture.cut
        else:
            output, cut = read_bounded(start.output_file, start.output_bytes)
        try:
            remove_tree(start.scratch)
        except OSError as error:
            sys.stderr.write(f"launcher: cannot remove {start.scratch}: {error}\n")
        ended = self.ending or ("exited" if exited else "signalled")
        return AgentEnd(
            ended=ended,
            exit_code=os.WEXITSTATUS(self.status or 0) if exited and ended != "startFailed" else None,
            signal=os.WTERMSIG(self.status or 0) if signalled else None,
            message=self.message,
            output=text_of(output, cut),
            output_truncated=cut,
            log_tail=text_of(self.capture.log(), cut=False),
            log_bytes=self.capture.total,
            seconds=seconds,
        )


def start_failure(error: BaseException, start: AgentStart) -> str:  # noqa: PLR0911 (a table)
    """What a user can read about an agent that could not be started."""
    command = start.argv[0]
    if isinstance(error, ValueError):
        return (
            f"the task or the environment cannot be handed over ({error}); use agentProtocol.task.from: file or stdin"
        )
    if not isinstance(error, OSError):
        return f"the agent could not be started: {type(error).__name__}: {error}"
    if start.cwd and not os.path.isdir(start.cwd):
        return f"working folder {start.cwd}: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        if "/" in command and os.path.exists(command):
            return f"command {command}: the interpreter named in its first line does not exist; correct that line"
        where = "does not exist" if "/" in command else f"not found in PATH={start.env.get('PATH', '')}"
        return f"command {command}: {where}; correct `command` of the container `agent`, or install it"
    if isinstance(error, PermissionError):
        return f"command {command}: not executable ({error.strerror}); chmod +x, or name its interpreter in `command`"
    if error.errno == errno.ENOEXEC:
        return f"command {command}: neither a program nor a script with an interpreter in its first line (#!)"
    if error.errno == errno.E2BIG:
        return (
            "the task is too long for an argument or a variable (128 KiB); use agentProtocol.task.from: file or stdin"
        )
    return f"command {command}: {error.strerror}"


INHERITED: dict[str, str] = {}
"""The environment of the launcher before any module could change it."""
KEPT_OPEN: set[int] = set()
"""Files and devices that a preloaded module has opened and may need in the agent."""


def guard(source: socket.socket, program: list[str] | None) -> AgentStart:
    """The life of a guardian, which waits for a channel first. Returns in a forked agent only, with what to run."""
    try:
        os.setsid()
        gc.disable()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        close_all_but({source.fileno()} | KEPT_OPEN)
        _, fd = receive_descriptor(source)
        source.close()
        if fd is None:
            os._exit(0)
        channel = socket.socket(fileno=fd)
        message = read_frame(channel)
        if message is None:
            os._exit(0)
        start = AgentStart(**message)
        if start.defaults is not None:
            start = start._replace(env={**start.defaults, **INHERITED, **start.env})
        if start.processes is not None and start.process_headroom is not None:
            start.rlimits["NPROC"] = tasks_of_user() + start.process_headroom
        guardian = Guardian(channel, start, program)
        try:
            is_agent = guardian.launch()
        except (OSError, ValueError) as error:
            guardian.ending = "executorLost" if isinstance(error, OSError) else "startFailed"
            guardian.message = start_failure(error, start) if isinstance(error, ValueError) else str(error)
            guardian.report({"event": "ended", **guardian._end(0.0)._asdict()})
            os._exit(0)
        if is_agent:
            gc.enable()
            return start
        guardian.report({"event": "ended", **guardian.watch()._asdict()})
        os._exit(0)
    except BaseException:  # noqa: BLE001 (a process boundary: a bug of ours is shown, the worker sees the channel close)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# --- Launcher -------------------------------------------------------------------------------------------------------


def take_place(program: list[str]) -> None:
    """Makes the import path what it is under `python SCRIPT`, `python -m NAME` and `python -c TEXT`."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    kind, target = program
    if kind == "script":
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    else:
        sys.path[0] = os.getcwd() if kind == "module" else ""


def preload(modules: list[str]) -> list[str]:
    """Imports the modules; returns notes for the log. ImportError and whatever else they raise passes."""
    before = open_descriptors()
    for name in modules:
        load(name)
    notes = []
    for fd, mode in open_descriptors().items():
        if fd in before:
            continue
        if stat.S_ISREG(mode) or stat.S_ISCHR(mode):
            KEPT_OPEN.add(fd)
        else:
            notes.append(f"a preloaded module opened {os.readlink(f'/proc/self/fd/{fd}')}, which is closed in agents")
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        notes.append(f"the preloaded modules started threads ({threads - 1}), which a forked agent does not have")
    return notes


def load(name: str) -> None:
    """Imports a module, or takes an attribute from one: libraries load much only when it is first asked for."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        owner, _, attribute = name.rpartition(".")
        if error.name != name or not owner or not hasattr(importlib.import_module(owner), attribute):
            raise


def serve() -> tuple[list[str], AgentStart] | None:
    """The life of the launcher. None when the worker is gone and all is ended; in a forked agent what to run."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    plan = Plan(**json.loads(control.recv(1 << 20)))
    if plan.sealed:
        prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    INHERITED.update(os.environ)
    notes: list[str] = []
    try:
        if plan.program is not None:
            take_place(plan.program)
            notes = preload(plan.preload)
            if plan.program[0] == "script":
                compile_ahead(plan.program[1])
    except BaseException as error:  # noqa: BLE001 (the user's modules: whatever they raise is reported)
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    children = ChildSignal()
    spared = set(living_below(os.getpid(), set()))
    gc.collect()
    gc.freeze()
    control.send(json.dumps({"ready": sys.version.split()[0], "notes": notes}).encode())
    poll = select.poll()
    poll.register(control.fileno(), select.POLLIN)
    poll.register(children.fd, select.POLLIN)
    while True:
        # One guardian is always there beforehand: a fork of many modules takes milliseconds.
        spare, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            control.detach()
            spare.detach()
            return plan.program or [], guard(theirs, plan.program)
        spared.add(pid)
        theirs.close()
        channel = _next_channel(control, poll, children, spared)
        if channel is not None:
            try:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", channel))
                spare.sendmsg([b"start"], [rights])
            except BrokenPipeError:
                pass  # it was killed: closing the channel tells the worker so
            os.close(channel)
        spare.close()
        if channel is None:
            _end_guardians(children, spared)
            return None


def _next_channel(control: socket.socket, poll: select.poll, children: ChildSignal, spared: set[int]) -> int | None:
    """Waits for the channel of an agent to start, doing meanwhile what else is to do; None when the worker is gone."""
    while True:
        for fd, _ in poll.poll():
            if fd == children.fd:
                children.clear()
                _bury(spared)
                continue
            data, channel = receive_descriptor(control)
            if channel is not None or not data:
                return channel
            _send(json.loads(data)["kill"], signal.SIGKILL)


def receive_descriptor(source: socket.socket) -> tuple[bytes, int | None]:
    """A message and the descriptor that comes with it, where one does; no message when the other side is gone."""
    try:
        data, ancillary, _, _ = source.recvmsg(1024, socket.CMSG_SPACE(4))
    except ConnectionResetError:
        return b"", None
    for _, _, fds in ancillary:
        return data, struct.unpack("i", fds[:4])[0]
    return data, None


def _bury(spared: set[int]) -> None:
    """Collects guardians; when one was killed, what it left fell to us: nothing of that may live.

    Nor what that has led to: an orphan may end just when its child is not yet to be seen.
    """
    orphaned = False
    for pid, status in reap():
        orphaned = orphaned or pid not in spared or status != 0
        spared.discard(pid)
    if orphaned:
        kill_tree(os.getpid(), spared)


def _end_guardians(children: ChildSignal, spared: set[int]) -> None:
    """The worker is gone, so the guardians kill their agents and go; one that does not is killed with all it has."""
    poll = select.poll()
    poll.register(children.fd, select.POLLIN)
    give_up = time.monotonic() + 2 * UNKILLABLE_SECONDS
    while has_children() and time.monotonic() < give_up:
        poll.poll(1000)
        children.clear()
        _bury(spared)
    kill_tree(os.getpid(), set())


# --- The agent, forked: as under `python` ---------------------------------------------------------------------------


def run_program(program: list[str], start: AgentStart) -> NoReturn:
    """Runs the script, module or text as `__main__` and exits with the code and the words of `python`."""
    take_place(program)
    sys.argv = list(start.argv)
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    reseed()
    before = set(sys.modules)
    code = run_main(*program)
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    daemons = threading is not None and threading.active_count() > 1
    if not daemons:
        let_go(before)
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    if daemons:  # which only the interpreter's own end can hold still
        sys.exit(code)
    os._exit(code & 0xFF)


def run_main(kind: str, target: str) -> int:
    """The exit code of the program, after what `python` would have said about an error."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        if kind == "module":
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` calls
        elif kind == "script":
            run_script(target, main)
        else:
            exec(compile(target, "<string>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 (the agent's: shown as `python` shows it)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def let_go(before: set[str]) -> None:
    """Finalizes what the agent made, files that it did not close included, but not the preloaded modules.

    The interpreter's own end would take every module apart, and copy every page of them for it: 30 ms for `openai`.
    """
    for thing in gc.get_objects():  # without what is frozen: what was there before the fork
        if issubclass(type(thing), io.IOBase):
            try:
                thing.flush()
            except Exception:  # noqa: BLE001, S110 (closed, or any class of the agent's: `python` ignores it too)
                pass
    for name in [name for name in sys.modules if name == "__main__" or name not in before]:
        del sys.modules[name]
    gc.collect()


def run_script(target: str, main: types.ModuleType) -> None:
    path = _main_path(target)
    try:
        code = compiled(path, target)
    except OSError as error:
        command = getattr(sys, "orig_argv", [sys.executable])[0]
        sys.stderr.write(f"{command}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _main_path(target: str) -> str:
    return os.path.abspath(target) if sys.version_info >= (3, 9) else target


COMPILED: dict[str, tuple[tuple[int, int, int], types.CodeType]] = {}
"""Path of a script → what it was when it was compiled, and its code."""


def compiled(path: str, target: str) -> types.CodeType:
    """The code of a script: compiled ahead where the file is still the same. OSError, SyntaxError, ValueError."""
    with open(target, "rb") as file:
        found = os.fstat(file.fileno())
        identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        known = COMPILED.get(path)
        if known is None or known[0] != identity:
            COMPILED[path] = known = identity, compile(file.read(), path, "exec", dont_inherit=True)
    return known[1]


def compile_ahead(target: str) -> None:
    try:
        compiled(_main_path(target), target)
    except (OSError, SyntaxError, ValueError):
        pass  # each agent says so, as `python` would


def reseed() -> None:
    """Generators that were seeded at import would be the same in every rollout; `random` sees to itself at a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


if __name__ == "__main__":
    _agent = serve()
    if _agent is not None:
        run_program(*_agent)
