"""What is the worker's own: its parts may be killed one by one, and its user may be mistaken."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from kitestring_rollout.worker.main import WorkerMistake, work
from tests.worker.conftest import RUN, StartWorker, WorkerApart, WorkerHere, living, worker_config
from tests.worker.executor_contract import Setup, marked, python
from tests.worker.fake_queue import CREDENTIAL, FakeQueue, make_lease

DAEMON = "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))\n"


async def launcher_of(worker: WorkerHere) -> psutil.Process:
    pid = worker.process.pid if isinstance(worker, WorkerApart) else os.getpid()
    found = [child for child in psutil.Process(pid).children() if "launcher.py" in " ".join(child.cmdline())]
    assert len(found) == 1
    return found[0]


async def beating(queue: FakeQueue, marker: str, count: int) -> None:
    """Until all leases have a heartbeat and so many processes bear the marker."""
    await queue.until(lambda: len(queue.beats) == len(queue.leased))
    async with asyncio.timeout(10):
        while len(living(marker)) < count:  # noqa: ASYNC110 (nothing of ours says when an agent's grandchild is there)
            await asyncio.sleep(0.01)


async def test_success_needs_no_gateway(start_executor: StartWorker, queue: FakeQueue) -> None:
    await start_executor(Setup(command=python("print('done')")))
    assert (await queue.run(make_lease(base_url="http://gateway.invalid:8080/r/token"))).ended == "exited"


async def test_agents_outlive_the_launcher_and_the_next_gets_another(
    start_executor: StartWorker, queue: FakeQueue, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    marker, mark = marked()
    worker = await start_executor(Setup(command=python(f"{mark}print(open({str(go)!r}).read())"), capacity=1))
    lease = await queue.put(make_lease(ttl_seconds=0.3))
    await beating(queue, marker, 1)
    launcher = await launcher_of(worker)
    launcher.kill()
    await asyncio.to_thread(launcher.wait)
    go.write_text("gone on")
    assert (await queue.finished(lease)).output == "gone on\n"
    second = await queue.put(make_lease())
    await asyncio.to_thread(go.write_text, "again")
    assert (await queue.finished(second)).output == "again\n"


@pytest.mark.parametrize("victims", ["worker", "launcher first", "worker first"])
async def test_whatever_of_ours_is_killed_no_agent_is_left(
    start_executor: StartWorker, queue: FakeQueue, victims: str
) -> None:
    marker, mark = marked()
    code = f"import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\n{mark}{DAEMON}time.sleep(600)"
    worker = await start_executor(Setup(command=python(code), apart=True, drain_seconds=0.0))
    for _ in range(3):
        await queue.put(make_lease(ttl_seconds=0.3))
    await queue.until(lambda: len(queue.leased) == 3)
    await beating(queue, marker, 6)
    launcher = await launcher_of(worker)
    if victims == "launcher first":
        launcher.kill()
    worker.kill()
    if victims == "worker first":
        launcher.kill()
    await worker.gone(marker)
    await asyncio.to_thread(launcher.wait, 15)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals(start_executor: StartWorker, queue: FakeQueue, number: int) -> None:
    worker = await start_executor(Setup(command=python("pass"), apart=True))
    assert isinstance(worker, WorkerApart)
    worker.process.send_signal(number)
    assert await worker.ended() == 0


async def test_scratch_is_empty_in_the_end(start_executor: StartWorker, queue: FakeQueue, tmp_path: Path) -> None:
    worker = await start_executor(Setup(command=python("open('x', 'w')")))
    await queue.run(make_lease())
    await worker.stop()
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_without_a_working_folder_it_is_the_scratch_folder(start_executor: StartWorker, queue: FakeQueue) -> None:
    await start_executor(Setup(command=python("import os; print(os.getcwd() == os.environ['HOME'])")))
    assert (await queue.run(make_lease())).output == "True\n"


async def test_a_name_may_be_that_of_the_host(queue: FakeQueue, tmp_path: Path) -> None:
    config = worker_config(tmp_path, queue.url, Setup(command=["true"]), [])
    worker = WorkerHere(config.model_copy(update={"name": "worker {hostname}"}))
    await queue.run(make_lease())
    assert {request.executor for request in queue.requests} == {f"worker {socket.gethostname()}"}
    await worker.stop()


def lingering(queue: FakeQueue, tmp_path: Path, code: str, seconds: float) -> WorkerHere:
    config = worker_config(tmp_path, queue.url, Setup(command=python(code)), [])
    return WorkerHere(config.model_copy(update={"linger_seconds": seconds}))


async def test_after_the_end_of_a_run_it_may_wait_to_be_told_to_end(queue: FakeQueue, tmp_path: Path) -> None:
    marker, mark = marked()
    worker = lingering(queue, tmp_path, f"{mark}import time; time.sleep(600)", 600.0)
    await queue.put(make_lease(ttl_seconds=0.3))
    await beating(queue, marker, 1)
    await queue.end()
    await worker.gone(marker)
    async with asyncio.timeout(10):
        await worker.stop()


async def test_a_trainer_that_was_only_started_anew_finds_it_there(queue: FakeQueue, tmp_path: Path) -> None:
    worker = lingering(queue, tmp_path, "print('done')", 600.0)
    await queue.run(make_lease())
    await queue.end()
    await queue.stop()
    queue.ended = False
    await queue.start()
    assert (await queue.run(make_lease())).output == "done\n"
    await worker.stop()


async def test_nobody_waits_for_ever_after_the_end_of_a_run(queue: FakeQueue, tmp_path: Path) -> None:
    worker = lingering(queue, tmp_path, "pass", 0.2)
    await queue.run(make_lease())
    await queue.end()
    assert await worker.ended() == 0


async def test_secrets_of_the_agent_come_from_files(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    config = worker_config(tmp_path, queue.url, Setup(command=python("import os; print([os.environ['KEY']])")), [])
    agent = config.agent.model_copy(update={"env_files": {"KEY": tmp_path / "key"}})
    worker = WorkerHere(config.model_copy(update={"agent": agent}))
    assert (await queue.run(make_lease())).output == "['s3cret\\n']\n"
    await worker.stop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queue_credential_file": Path("/no/credential")}, "queue_credential_file: cannot read /no/credential"),
        ({"scratch_root": Path("/proc/scratch")}, "scratch_root: cannot make a folder below /proc/scratch"),
    ],
)
async def test_mistakes_are_named(queue: FakeQueue, tmp_path: Path, change: dict[str, Path], message: str) -> None:
    config = worker_config(tmp_path, queue.url, Setup(command=["true"]), []).model_copy(update=change)
    with pytest.raises(WorkerMistake, match=message):
        await work(config, lambda _: None)


async def test_a_refused_credential_ends_it_with_2_and_one_line(queue: FakeQueue, tmp_path: Path) -> None:
    config = worker_config(tmp_path, queue.url, Setup(command=["true"]), [])
    (tmp_path / "credential").write_text("wrong")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, config.model_dump_json(by_alias=True), stdout=-1, stderr=-1
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    line = f"worker: the queue at {queue.url} refuses the credential of queue_credential_file; correct it\n"
    assert err.decode() == line
    assert CREDENTIAL not in err.decode()
