"""An agent that tries every wall around it and prints what it found as one JSON object. Standard library only.

Its task names what to try to reach. Beside it lies `hostile.py`, the attacks of tests/thread on the parts by HTTP.
"""

import ctypes
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import signal
import socket
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile

SOCKET = Path("/kitestring/socket/launcher.sock")
FOLDERS = (
    *("/", "/bin", "/dev", "/dev/shm", "/etc", "/home", "/lib", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin"),
    *(
        "/srv",
        "/sys",
        "/sys/fs/cgroup",
        "/tmp",
        "/usr",
        "/usr/local/bin",
        "/var",
        "/var/tmp",
        "/var/run",
        "/kitestring",
    ),
    *("/kitestring/bin", "/kitestring/socket", "/kitestring/scratch", "/etc/kitestring", "/etc/kitestring-secrets"),
)
SECONDS = 2.0
"""For a connection: what a wall swallows takes all of it."""


class Notes:
    """What `hostile` writes its tries down in."""

    def __init__(self):
        self.attempt = os.environ["KITESTRING_ATTEMPT"]
        self.refusals = []

    def refused(self, what, status, code, _headers):
        self.refusals.append([what, status, code])


def main():
    task = json.loads(sys.stdin.read())
    found = {
        "identity": identity(),
        "system": system(),
        "processes": [process(folder) for folder in all_processes()],
        "writable": writable(),
        "token": Path("/var/run/secrets/kubernetes.io").exists(),
        "socket": launcher_socket(),
        "environment": sorted(os.environ),
        "words": words(),
        "reached": reached(task["targets"]),
        "neighbours": neighbours(task["neighbour_ports"]),
        "loopback": sorted(port for port in listening() if connects("127.0.0.1", port) == "open"),
        "refusals": by_http(task["queue"]),
        "signals": signals(),
    }
    print(json.dumps(found))


# --- who it is, and what the kernel lets it do ---


def identity():
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    names = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    return {name: status[name].split() for name in names}


def system():
    """Every call that would get it further, and how it ended: its error's name, or "done"."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *arguments):
        if function(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "")

    tries = {
        "setuid root": lambda: os.setuid(0),
        "setuid worker": lambda: os.setuid(65532),
        "setgid worker": lambda: os.setgid(65532),
        "setgroups": lambda: os.setgroups([0]),
        "unshare user": lambda: call(libc.unshare, 0x10000000),
        "unshare mount": lambda: call(libc.unshare, 0x00020000),
        "mount": lambda: call(libc.mount, b"none", b"/tmp", b"tmpfs", 0, None),
        "chroot": lambda: os.chroot("/tmp"),
        "mknod": lambda: os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0)),
        "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close(),
        "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).close(),
        "trace launcher": lambda: call(libc.ptrace, 16, 1, 0, 0),
        "sethostname": lambda: socket.sethostname("other"),
        "bpf": lambda: call(libc.syscall, 321, 0, 0, 0),
    }
    return {name: outcome(attempt) for name, attempt in tries.items()}


def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


# --- what it sees ---


def all_processes():
    return sorted(folder for folder in Path("/proc").iterdir() if folder.name.isdigit())


def process(folder):
    """Who a process is, and what of it can be read."""
    readable = {
        name: outcome(lambda path=folder / name: path.open("rb").read(1)) for name in ("environ", "mem", "maps")
    }
    readable["fd"] = outcome(lambda: list((folder / "fd").iterdir()))
    own = folder.name == str(os.getpid())
    return {"own": own, "uid": folder.stat().st_uid, "command": command(folder), **readable}


def command(folder):
    return hostile.read(folder / "cmdline").replace(b"\0", b" ").decode(errors="replace")[:80]


def mounts():
    """Where something is mounted, but the image itself."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted({line.split()[4] for line in lines} - {"/"})


def writable():
    """Folders and mounted files that it can write to."""
    found = []
    for name in sorted({*FOLDERS, *mounts()}):
        path = Path(name)
        if path.is_dir():
            probe = path / f"probe-{os.getpid()}"
            if outcome(probe.touch) == "done":
                probe.unlink()
                found.append(name)
        elif path.is_file() and outcome(lambda path=path: path.open("r+b").close()) == "done":
            found.append(name)
    return found


def words():
    """Beginnings of the hashes of all words that it can read outside of the image: environments and mounted files."""
    found = set()
    for folder in all_processes():
        for name in ("environ", "cmdline"):
            found |= set(hostile.words(hostile.read(folder / name)))
    for mount in (*mounts(), "/run", "/etc/kitestring", "/etc/kitestring-secrets", "/kitestring"):
        if not re.match(r"/(proc|sys|dev)(/|$)", mount):
            for path in files(Path(mount)):
                found |= set(hostile.words(hostile.read(path)))
    return sorted(hashlib.sha256(word).hexdigest()[:10] for word in found if 8 <= len(word) <= 200)


def files(root):
    if root.is_file():
        yield root
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and path.stat().st_size < 1 << 20:
                yield path


def launcher_socket():
    """The way by which the launcher came to the worker: nobody else may."""

    def connect():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(SOCKET))

    def bind():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
            own.bind(str(SOCKET))

    def lock():
        with (SOCKET.parent / "launcher.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def replace():
        (SOCKET.parent / "launcher.lock").unlink()

    return {attempt.__name__: outcome(attempt) for attempt in (connect, bind, lock, replace)}


# --- what it reaches ---


def connects(host, port):
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except OSError as error:
        return type(error).__name__
    return "open"


def reached(targets):
    with ThreadPoolExecutor(32) as threads:
        return dict(threads.map(lambda one: (one[0], connects(*one[1:])), targets))


def neighbours(ports):
    """Pods on this node, by address and port."""
    own = own_address()
    near = ipaddress.ip_network(f"{own}/25", strict=False)
    tries = [(str(host), port) for host in near.hosts() if str(host) != own for port in ports]
    with ThreadPoolExecutor(128) as threads:
        ends = threads.map(lambda one: (one, connects(*one)), tries)
        return [f"{host}:{port}" for (host, port), end in ends if end == "open"]


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        some.connect(("192.0.2.1", 9))
        return some.getsockname()[0]


def listening():
    """Ports on which anything in the pod listens, which shares one network."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {int(fields[1].rsplit(":", 1)[1], 16) for fields in lines if fields[3] == "0A"}


def by_http(queue):
    """Attacks on gateway and queue, with its own token and with guesses."""
    notes = Notes()
    bearer = {**hostile.JSON, "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    guess = {**hostile.JSON, "Authorization": "Bearer kitestring"}
    lease = json.dumps({"executor": "agent", "capacity": 1, "wait_seconds": 0})
    tries = [*hostile.gateway(notes, "01920000-0000-7000-8000-000000000000")]
    tries += [
        one for one in hostile.queue_and_collector({"queue": queue, "collector": ""}) if one[0].startswith("queue")
    ]
    for headers in (hostile.JSON, bearer, guess):
        tries += [
            ("queue lease", "POST", f"{queue}/queue/v1/lease", headers, lease),
            ("queue wanted", "GET", f"{queue}/queue/v1/wanted?limit=1", headers, None),
            ("queue lost", "POST", f"{queue}/queue/v1/rollouts/x/lost", headers, "{}"),
            ("queue live", "PUT", f"{queue}/run/v1/live", headers, '{"steps": 1}'),
        ]
    for what, method, url, headers, body in tries:
        notes.refused(what, *hostile.ask(method, url, headers, body))
    return notes.refusals


def signals():
    """To the first process of its container, which is the launcher."""
    return {name: outcome(lambda number=number: os.kill(1, number)) for name, number in (("kill", signal.SIGKILL),)}


main()
