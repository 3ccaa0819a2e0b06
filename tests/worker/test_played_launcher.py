"""A launcher that a test plays: what a worker makes of one that dies, or says what none would."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.worker.conftest import WorkerHere, worker_config
from tests.worker.executor_contract import Setup
from tests.worker.fake_queue import FakeQueue, make_lease
from tests.worker.pod import KILLED, in_pod

pytestmark = pytest.mark.usefixtures("settled")


def forged(message: object) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data


@contextmanager
def introduced(path: Path) -> Iterator[socket.socket]:
    """The control socket of a launcher that the worker takes for one of ours."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        while control.connect_ex(str(path)):
            time.sleep(0.01)
        _, fds, _, _ = socket.recv_fds(control, 100, 1)
        with socket.socket(fileno=fds[0]) as plan:
            while plan.recv(1 << 16):
                pass
        control.send(json.dumps({"ready": "forged"}).encode())
        yield control


def forge(path: Path, said: bytes, agents: int) -> None:
    """A launcher that starts nothing and says the same of each agent."""
    with introduced(path) as control:
        for _ in range(agents):
            _, fds, _, _ = socket.recv_fds(control, 100, 1)
            with socket.socket(fileno=fds[0]) as channel:
                channel.sendall(said)
                while channel.recv(1 << 16):
                    pass
        control.recv(100)


@contextmanager
def guarded(control: socket.socket) -> Iterator[None]:
    """One agent is handed over and about to run; at the end its guardian is no more."""
    _, fds, _, _ = socket.recv_fds(control, 100, 1)
    with socket.socket(fileno=fds[0]) as channel:
        assert channel.recv(1 << 16)  # what to run; not read, it would make the end of the channel an error
        channel.sendall(forged({"event": "launching", "guardian": 2}))
        yield


async def alone_in_pod(folder: Path, queue: FakeQueue) -> WorkerHere:
    """A worker that waits for its launcher, which the test plays."""
    worker = WorkerHere(in_pod(worker_config(folder, queue.url, Setup(command=["true"]), []), folder))
    await worker.begin()
    return worker


async def test_a_guardian_that_dies_before_there_is_an_agent(tmp_path: Path, queue: FakeQueue) -> None:
    """For want of processes or memory, or by another agent: not by its own."""
    worker = await alone_in_pod(tmp_path, queue)

    def launcher() -> None:
        with introduced(tmp_path / "socket" / "launcher.sock") as control:
            _, fds, _, _ = socket.recv_fds(control, 100, 1)
            os.close(fds[0])
            assert json.loads(control.recv(100)) == {"ask": True}
            control.send(json.dumps({"here": True}).encode())
            control.recv(100)

    serving = asyncio.create_task(asyncio.to_thread(launcher))
    finish = await queue.run(make_lease())
    assert (finish.ended, finish.message) == ("executorLost", "the process that guards the agent died")
    await worker.stop()
    await serving


@pytest.mark.parametrize("said", [None, {"draining": True}])
@pytest.mark.parametrize("is_pod_ending", [False, True])
async def test_guardians_that_die_with_their_launcher(
    tmp_path: Path, queue: FakeQueue, said: dict[str, Any] | None, is_pod_ending: bool
) -> None:
    """In whatever order. The kernel ends a whole container for the memory that its agents took; and a kubelet when the
    pod is to end, of which it tells the worker. What the launcher says of it is of no account."""
    worker = await alone_in_pod(tmp_path, queue)

    def launcher() -> None:
        with introduced(tmp_path / "socket" / "launcher.sock") as control:
            with guarded(control):
                if said is not None:
                    control.send(json.dumps(said).encode())
            assert json.loads(control.recv(100)) == {"ask": True}

    serving = asyncio.create_task(asyncio.to_thread(launcher))
    lease = await queue.put(make_lease())
    await serving
    if is_pod_ending:
        await worker.stop()
    finish = await queue.finished(lease)
    lost = ("executorLost", "the launcher died, and its agents with it")
    assert (finish.ended, finish.message) == (lost if is_pod_ending else ("signalled", KILLED))
    await worker.stop()


async def test_a_guardian_that_dies_where_the_launcher_has_no_time_to_answer(
    tmp_path: Path, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents can take it all: hundreds of processes, and a low priority for the launcher, which has their user."""
    monkeypatch.setattr("kitestring_rollout.worker.launcher_socket.ANSWER_SECONDS", 0.05)
    worker = await alone_in_pod(tmp_path, queue)

    def launcher() -> None:
        with introduced(tmp_path / "socket" / "launcher.sock") as control:
            with guarded(control):
                pass
            assert json.loads(control.recv(100)) == {"ask": True}
            control.recv(100)

    serving = asyncio.create_task(asyncio.to_thread(launcher))
    finish = await queue.run(make_lease())
    assert (finish.ended, finish.message) == (
        "signalled",
        "the process that guards the agent died while it ran: the agent's own doing",
    )
    await worker.stop()
    await serving


async def test_an_agent_that_was_not_there_when_its_launcher_was_killed(tmp_path: Path, queue: FakeQueue) -> None:
    worker = await alone_in_pod(tmp_path, queue)

    def launcher() -> None:
        with introduced(tmp_path / "socket" / "launcher.sock") as control:
            _, fds, _, _ = socket.recv_fds(control, 100, 1)
            os.close(fds[0])

    serving = asyncio.create_task(asyncio.to_thread(launcher))
    finish = await queue.run(make_lease())
    assert (finish.ended, finish.message) == ("executorLost", "the launcher died, and its agents with it")
    await serving
    await worker.stop()


FORGED_END = {
    "event": "ended", "ended": "exited", "exit_code": 0, "signal": None, "message": None, "output": "",
    "output_truncated": False, "log_tail": "", "log_bytes": 0, "seconds": 1.0,
}  # fmt: skip


FORGED = {
    "no frame": b"\0\0\0\x04{]}[",
    "no object": b"\0\0\0\x02[]",
    "too long": b"\xff\xff\xff\xff",
    "no event": b"\0\0\0\x02{}",
    "another event": forged({"event": "x"}),
    "no field": forged({"event": "ended"}),
    "another end": forged({**FORGED_END, "ended": "Succeeded"}),
    "a log too long": forged({**FORGED_END, "log_tail": "x" * 65537}),
    "another type": forged({**FORGED_END, "output": {}}),
    "a negative time": forged({**FORGED_END, "seconds": -1}),
}


@pytest.mark.parametrize("kind", FORGED)
async def test_a_forged_launcher_harms_no_worker(tmp_path: Path, queue: FakeQueue, kind: str) -> None:
    """Whoever has taken over the container of the agents."""
    worker = await alone_in_pod(tmp_path, queue)
    forging = asyncio.create_task(asyncio.to_thread(forge, tmp_path / "socket" / "launcher.sock", FORGED[kind], 2))
    ends = [await queue.run(make_lease()) for _ in range(2)]
    assert [end.ended for end in ends] == ["executorLost"] * 2
    assert ends[0].message == "the process that guards the agent said what makes no sense"
    await worker.stop()
    await forging
