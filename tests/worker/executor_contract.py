"""What every executor of agents must hold: the worker here, the Kubernetes Job per rollout likewise.

An implementation subclasses the contracts and gives the fixture `start_executor`: a factory of running executors that
work for the fixture `queue`. Agents are `python3 -c TEXT` or `sh -c TEXT`, so that any image with both will do.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import pytest

from kitestring_api import names
from kitestring_rollout.protocol.queue import Finish, Lease
from tests.worker.fake_queue import CREDENTIAL, FakeQueue, make_lease


@dataclass(frozen=True)
class Setup:
    """What a pool says of its agent, and where its agent may leave word for the test."""

    command: list[str]
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    working_dir: str | None = None
    capacity: int = 4
    grace_seconds: float = 5.0
    drain_seconds: float = 10.0
    apart: bool = False
    """In processes of its own that `kill` may hit."""


class Executor(Protocol):
    async def stop(self) -> None:
        """Tells it to stop, as a SIGTERM does, and waits for its end."""

    async def ended(self) -> int:
        """Waits until it ends by itself; its exit code."""

    def kill(self) -> None:
        """SIGKILL to it, but not to the agents: those are its task even now."""

    def processes(self, marker: str) -> list[int]:
        """Living processes that have the marker."""

    async def gone(self, marker: str) -> None:
        """Waits until no process that has the marker lives; fails after a while."""


StartExecutor = Callable[[Setup], Any]


def python(code: str) -> list[str]:
    return ["python3", "-c", code]


def marked() -> tuple[str, str]:
    """A marker, and the line of Python by which an agent puts it on itself and on all that it forks."""
    marker = uuid.uuid4().hex[:15]
    return marker, f"open('/proc/self/comm', 'w').write('{marker}')\n"


class ExecutorContract:
    """For agents of any kind, also for preloaded ones: all agents here are Python programs."""

    async def run(self, start: StartExecutor, queue: FakeQueue, code: str, **setup: Any) -> Finish:
        task = setup.pop("task", None)
        lease = make_lease(task, **setup.pop("lease", {}))
        await start(Setup(command=python(code), **setup))
        return await queue.run(lease)

    async def test_success(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(
            start_executor, queue, "import sys; print('out'); print('err', file=sys.stderr, flush=True); print('end')"
        )
        assert (finish.ended, finish.exit_code, finish.signal) == ("exited", 0, None)
        assert (finish.output, finish.output_truncated) == ("out\nend\n", False)
        assert sorted(finish.log_tail.split()) == ["end", "err", "out"]
        assert finish.log_bytes == 12
        assert finish.start_seconds > 0
        assert 0 < finish.seconds < 20

    @pytest.mark.parametrize(
        ("code", "exit_code", "said"),
        [
            ("raise SystemExit(3)", 3, ""),
            ("import sys; sys.exit('no model')", 1, "no model\n"),
            ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
            ("import os; os._exit(255)", 255, ""),
            ("syntax error", 1, "SyntaxError: invalid syntax\n"),
        ],
    )
    async def test_failure(
        self, start_executor: StartExecutor, queue: FakeQueue, code: str, exit_code: int, said: str
    ) -> None:
        finish = await self.run(start_executor, queue, code)
        assert (finish.ended, finish.exit_code) == ("exited", exit_code)
        assert finish.log_tail.endswith(said)

    async def test_signal(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(start_executor, queue, "import os; os.kill(os.getpid(), 11)")
        assert (finish.ended, finish.exit_code, finish.signal) == ("signalled", None, 11)

    @pytest.mark.parametrize("code", ["raise SystemExit('no gateway')", "import time; time.sleep(600)"])
    async def test_failure_where_no_gateway_can_be_reached(
        self, start_executor: StartExecutor, queue: FakeQueue, code: str
    ) -> None:
        lease = {"base_url": "http://gateway.invalid:8080/r/token", "deadline_seconds": 2.0}
        finish = await self.run(start_executor, queue, code, lease=lease)
        assert finish.ended == "cutOff"
        assert (finish.message or "").startswith(
            "http://gateway.invalid:8080 cannot be reached from the agent's side: "
        )

    DAEMON = "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))\n"

    async def test_an_agent_that_ends_its_guardian_has_failed(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        """It could otherwise choose not to be scored."""
        marker, mark = marked()
        code = f"import os, time\n{mark}{self.DAEMON}os.kill(os.getppid(), 9)\ntime.sleep(600)"
        executor = await start_executor(Setup(command=python(code)))
        for _ in range(2):  # the next agent gets a guardian again
            finish = await queue.run(make_lease())
            assert (finish.ended, finish.exit_code, finish.signal) == ("signalled", None, 9)
            assert finish.message == "the process that guards the agent died while it ran: the agent's own doing"
            await executor.gone(marker)

    async def test_an_agent_that_stops_its_guardian_has_failed(
        self, start_executor: StartExecutor, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kitestring_rollout.worker.attempt.MARGIN_SECONDS", 0.2)
        monkeypatch.setattr("kitestring_rollout.worker.attempt.UNKILLABLE_SECONDS", 0.1)
        marker, mark = marked()
        code = f"import os, time\n{mark}{self.DAEMON}os.kill(os.getppid(), 19)\ntime.sleep(600)"
        executor = await start_executor(Setup(command=python(code), grace_seconds=0.1))
        finish = await queue.run(make_lease(deadline_seconds=0.5))
        assert (finish.ended, finish.signal) == ("signalled", 9)
        assert finish.message == (
            "the process that guards the agent did not answer while it ran: the agent's own doing"
        )
        await executor.gone(marker)

    async def test_deadline_asks_first(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0)))\n"
            "print('here', flush=True); time.sleep(600)"
        )
        finish = await self.run(start_executor, queue, code, lease={"deadline_seconds": 1.0})
        assert (finish.ended, finish.output) == ("deadline", "here\nbye\n")
        assert 1.0 <= finish.seconds < 15

    async def test_a_request_to_end_that_comes_at_once_is_heard(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        code = "import time; time.sleep(600)"
        finish = await self.run(start_executor, queue, code, lease={"deadline_seconds": 1e-6}, grace_seconds=60)
        assert (finish.ended, finish.signal) == ("deadline", 15)

    async def test_deadline_of_an_agent_that_ignores_the_request(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        finish = await self.run(start_executor, queue, code, lease={"deadline_seconds": 2.0}, grace_seconds=0.3)
        assert (finish.ended, finish.signal) == ("deadline", 9)

    @pytest.mark.parametrize(
        "escape",
        [
            "os.fork() or time.sleep(600)",
            "os.fork() or (os.setsid(), time.sleep(600))",
            "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))",
            "os.fork() or (os.setpgid(0, 0), signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600))",
            "[os.fork() or (os.setsid(), os.fork(), time.sleep(600)) for _ in range(8)]",
        ],
        ids=["child", "session", "daemon", "group", "many"],
    )
    @pytest.mark.parametrize("end", ["", "; time.sleep(600)"], ids=["exits", "hangs"])
    async def test_nothing_outlives_the_agent(
        self, start_executor: StartExecutor, queue: FakeQueue, escape: str, end: str
    ) -> None:
        marker, mark = marked()
        executor = await start_executor(
            Setup(command=python(f"{mark}import os, signal, time; {escape}; print('up', flush=True){end}"))
        )
        finish = await queue.run(make_lease(deadline_seconds=1.0 if end else 20.0))
        assert finish.ended == ("deadline" if end else "exited")
        assert "up" in finish.output
        assert executor.processes(marker) == []

    async def test_a_child_that_holds_the_output_open_does_not_delay_the_end(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        finish = await self.run(start_executor, queue, "import os, time; os.fork() or time.sleep(600); print(1)")
        assert (finish.ended, finish.output) == ("exited", "1\n")
        assert finish.seconds < 15

    async def test_a_hundred_megabytes_are_counted_and_forgotten(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        code = "import os\nfor i in range(100): os.write(1, b'%d' % (i % 10) * 1_000_000)\nos.write(1, b'end')"
        finish = await self.run(start_executor, queue, code, protocol={"output": {"from": "stdout", "maxBytes": 1000}})
        assert finish.ended == "exited"
        assert finish.log_bytes == 100_000_003
        assert (finish.output, finish.output_truncated) == ("0" * 1000, True)
        assert len(finish.log_tail) == 65536
        assert finish.log_tail.endswith("9end")

    async def test_log_bytes(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(start_executor, queue, "print('0123456789')", limits={"log_bytes": 4})
        assert (finish.log_tail, finish.log_bytes, finish.output) == ("789\n", 11, "0123456789\n")

    async def test_any_bytes(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = "import os; os.write(1, bytes(range(256)))"
        finish = await self.run(start_executor, queue, code)
        assert finish.output == bytes(range(256)).decode("utf-8", "replace")
        assert finish.log_bytes == 256

    async def test_a_character_is_not_cut_in_two(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(
            start_executor, queue, "print('aé☃𝄞')", protocol={"output": {"from": "stdout", "maxBytes": 8}}
        )
        assert (finish.output, finish.output_truncated) == ("aé☃", True)

    async def test_output_by_file(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = f"import os; print('no'); open(os.environ['{names.ENV_OUTPUT_FILE}'], 'w').write('yes' * 3)"
        finish = await self.run(start_executor, queue, code, protocol={"output": {"from": "file", "maxBytes": 5}})
        assert (finish.output, finish.output_truncated) == ("yesye", True)
        assert finish.log_tail == "no\n"

    @pytest.mark.parametrize("code", ["pass", "os.symlink('/etc/passwd', path)", "os.mkfifo(path)", "os.mkdir(path)"])
    async def test_an_output_file_that_is_none(
        self, start_executor: StartExecutor, queue: FakeQueue, code: str
    ) -> None:
        code = f"import os; path = os.environ['{names.ENV_OUTPUT_FILE}']; {code}"
        finish = await self.run(start_executor, queue, code, protocol={"output": {"from": "file"}})
        assert (finish.ended, finish.exit_code, finish.output) == ("exited", 0, "")

    @pytest.mark.parametrize("kind", ["none", "lastMessage"])
    async def test_output_from_elsewhere(self, start_executor: StartExecutor, queue: FakeQueue, kind: str) -> None:
        finish = await self.run(start_executor, queue, "print(1)", protocol={"output": {"from": kind}})
        assert (finish.output, finish.output_truncated, finish.log_tail) == ("", False, "1\n")

    HOSTILE = (
        "plain",
        'it\'s "quoted" `id` $(id) $HOME ${PATH} %s %(x)s {x} {{x}}',
        "a\nb\r\nc\td\x0b\x1b[31m\x7f",
        "; rm -rf / & | > x < y * ? [a] ~ ! # \\",
        "key: value\n- item\n---\n!!python/object:os.system {}",
        "ünïcödé ☃ 𝄞 \u202e \ufeff \u2028",
        "-n --help -rf",
        "",
        " leading and trailing ",
    )

    READ: ClassVar[dict[str, str]] = {
        "stdin": "sys.stdin.buffer.read()",
        "file": f"open(os.environ['{names.ENV_TASK_FILE}'], 'rb').read()",
        "environment": f"os.environb[b'{names.ENV_TASK}']",
        "argument": "os.fsencode(sys.argv[-1])",
    }

    @pytest.mark.parametrize("delivery", READ)
    async def test_a_task_arrives_as_it_is(
        self, start_executor: StartExecutor, queue: FakeQueue, delivery: str
    ) -> None:
        code = f"import os, sys; sys.stdout.buffer.write({self.READ[delivery]})"
        await start_executor(
            Setup(
                command=python(code),
                args=["--", "x y"],
                protocol={"task": {"from": delivery, "format": "text", "field": "q"}},
            )
        )
        leases = [await queue.put(make_lease({"q": text, "other": 1})) for text in self.HOSTILE]
        assert [(await queue.finished(lease)).output for lease in leases] == list(self.HOSTILE)

    @pytest.mark.parametrize("delivery", READ)
    async def test_the_whole_task_arrives_as_json(
        self, start_executor: StartExecutor, queue: FakeQueue, delivery: str
    ) -> None:
        task = {"q": self.HOSTILE[1], "n": [1, 2.5, None, True], "nested": {"ü": {}}, "nul": "\0"}
        code = f"import os, sys; sys.stdout.buffer.write({self.READ[delivery]})"
        finish = await self.run(start_executor, queue, code, protocol={"task": {"from": delivery}}, task=task)
        assert json.loads(finish.output) == task

    async def test_a_value_that_is_no_text_arrives_as_json(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        protocol = {"task": {"from": "stdin", "format": "text", "field": "q"}}
        code = "import sys; print(sys.stdin.read())"
        finish = await self.run(start_executor, queue, code, protocol=protocol, task={"q": [1, "é"]})
        assert finish.output == '[1, "é"]\n'

    async def test_a_task_file_is_private(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = f"import os; print(oct(os.stat(os.environ['{names.ENV_TASK_FILE}']).st_mode & 0o777))"
        finish = await self.run(start_executor, queue, code, protocol={"task": {"from": "file"}})
        assert finish.output == "0o600\n"

    @pytest.mark.parametrize("delivery", ["stdin", "file"])
    async def test_a_large_task(self, start_executor: StartExecutor, queue: FakeQueue, delivery: str) -> None:
        code = f"import os, sys; print(len({self.READ[delivery]}))"
        protocol = {"task": {"from": delivery, "format": "text", "field": "q"}}
        finish = await self.run(start_executor, queue, code, protocol=protocol, task={"q": "é" * 8_000_000})
        assert finish.output == "16000000\n"

    async def test_an_agent_that_never_reads_its_input(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        protocol = {"task": {"from": "stdin"}}
        finish = await self.run(start_executor, queue, "print(1)", protocol=protocol, task={"q": "x" * 8_000_000})
        assert (finish.ended, finish.output) == ("exited", "1\n")

    async def test_a_task_without_the_field_is_named(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        protocol = {"task": {"from": "stdin", "format": "text", "field": "question"}}
        finish = await self.run(start_executor, queue, "print(1)", protocol=protocol, task={"qestion": "x"})
        assert finish.ended == "startFailed"
        assert finish.message is not None
        assert "'question' (agentProtocol.task.field); found: qestion" in finish.message

    async def test_the_environment_is_made_from_nothing(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        lease = make_lease()
        code = "import json, os; print(json.dumps(dict(os.environ)))"
        await start_executor(Setup(command=python(code), env={"MINE": "a b", "LANG": "C", "OPENAI_API_KEY": "mine"}))
        got = json.loads((await queue.run(lease)).output)
        assert got["MINE"] == "a b"
        assert got["LANG"] == "C"
        assert got[names.ENV_OPENAI_BASE_URL] == got[names.ENV_OPENAI_API_BASE] == f"{lease.base_url}/v1"
        assert got[names.ENV_OPENAI_API_KEY] == lease.token
        assert got[names.ENV_OPENAI_MODEL] == got[names.ENV_MODEL] == "policy"
        assert got[names.ENV_BASE_URL] == lease.base_url
        assert got[names.ENV_TRACEPARENT] == lease.traceparent
        assert got[names.ENV_OTEL_ENDPOINT] == f"{lease.base_url}/otlp"
        assert got[names.ENV_ROLLOUT] == lease.rollout
        assert got[names.ENV_ATTEMPT] == lease.attempt
        assert (got[names.ENV_STEP], got[names.ENV_MODE]) == ("1", "train")
        known = {value for name, value in vars(names).items() if name.startswith("ENV_")}
        # LC_CTYPE is Python's own doing, with LANG=C.
        assert set(got) - known == {"MINE", "LANG", "PATH", "HOME", "TMPDIR"} | (set(got) & {"LC_CTYPE"})

    async def test_no_credential_is_in_sight(
        self, start_executor: StartExecutor, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_OF_THE_EXECUTOR", "hush-3c41")
        code = (
            "import os\n"
            "def show(path):\n"
            "    try: print(path, open(path, 'rb').read())\n"
            "    except OSError as error: print(path, error.strerror)\n"
            "print(os.environ)\n"
            "pid = os.getpid()\n"
            "for _ in range(2):\n"
            "    show(f'/proc/{pid}/environ'); show(f'/proc/{pid}/cmdline')\n"
            "    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])\n"
            "print('fds', [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
            "              if os.path.lexists(f'/proc/self/fd/{fd}')])\n"
        )
        finish = await self.run(start_executor, queue, code, apart=True)
        assert "fds" in finish.output
        for secret in (CREDENTIAL, "hush-3c41", "lease-", queue.url):
            assert secret not in finish.log_tail
        assert "socket" not in finish.output

    async def test_only_the_standard_descriptors_are_open(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        code = "import os; fds = os.listdir('/proc/self/fd'); print(os.open('/', 0), os.read(0, 9), sorted(fds))"
        finish = await self.run(start_executor, queue, code)
        assert finish.output == "3 b'' ['0', '1', '2', '3']\n"

    async def test_a_folder_of_its_own_that_goes_with_it(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = (
            "import os, tempfile\n"
            "home = os.environ['HOME']\n"
            "mode = oct(os.stat(home).st_mode & 0o777)\n"
            "print(home, tempfile.gettempdir().startswith(home), mode)\n"
            "os.chdir(home)\n"
            "os.makedirs('a/b/c'); open('a/b/c/file', 'w').write('x'); os.symlink('/', 'a/root')\n"
            "os.chmod('a/b', 0)\n"
            "for _ in range(60):\n"
            "    os.mkdir('deep-' + 'x' * 200); os.chdir('deep-' + 'x' * 200)\n"
        )
        finish = await self.run(start_executor, queue, code)
        home, temporary, mode = finish.output.split()
        assert (temporary, mode) == ("True", "0o700")
        assert self.path_is_gone(home)

    def path_is_gone(self, path: str) -> bool:
        raise NotImplementedError

    async def test_each_agent_has_a_session_of_its_own(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = "import os; print(os.getpid() == os.getsid(0) == os.getpgid(0))"
        assert (await self.run(start_executor, queue, code)).output == "True\n"

    async def test_signals_are_as_in_a_shell(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = (
            "import signal, subprocess\n"
            "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,"
            " signal.getsignal(signal.SIGINT) == signal.default_int_handler,"
            " signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(),"
            " subprocess.run(['sh', '-c', 'yes | head -1'], capture_output=True).returncode)"
        )
        assert (await self.run(start_executor, queue, code)).output == "True True True True 0\n"

    async def test_limit_of_cpu_time(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(start_executor, queue, "while True: pass", limits={"cpu_seconds": 1})
        assert finish.ended == "signalled"
        assert finish.signal in (9, 24)

    async def test_limit_of_memory(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = "x = bytearray(50_000_000); print('fits', flush=True); y = bytearray(500_000_000)"
        finish = await self.run(start_executor, queue, code, limits={"memory_bytes": 300_000_000})
        assert (finish.output, finish.exit_code) == ("fits\n", 1)
        assert "MemoryError" in finish.log_tail

    async def test_limit_of_file_size(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = "open('x', 'wb').write(b'1' * 20000)"
        finish = await self.run(start_executor, queue, code, limits={"file_bytes": 10000})
        assert finish.exit_code == 1
        assert "File too large" in finish.log_tail

    async def test_limit_of_processes(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        marker, mark = marked()
        code = f"{mark}import os, time\nfor _ in range(20): os.fork() or time.sleep(600)\ntime.sleep(600)"
        executor = await start_executor(Setup(command=python(code), limits={"processes": 8}))
        finish = await queue.run(make_lease())
        assert (finish.ended, finish.signal) == ("signalled", 9)
        assert finish.message is not None
        assert "limits.processes allows 8" in finish.message
        assert executor.processes(marker) == []

    async def test_no_core_is_dumped(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
        assert (await self.run(start_executor, queue, code)).output == "(0, 0)\n"

    async def test_agents_run_at_once_up_to_the_capacity(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        await start_executor(Setup(command=python("import time; time.sleep(600)"), capacity=3, drain_seconds=0.0))
        leases = [await queue.put(make_lease(ttl_seconds=0.3)) for _ in range(5)]
        await queue.until(lambda: len(queue.leased) == 3)
        # Three heartbeats of each, and still no fourth lease.
        await queue.until(lambda: all(queue.beats.get(lease.lease, 0) >= 3 for lease in leases[:3]))
        assert len(queue.leased) == 3
        queue.cancelled.add(leases[0].lease)
        await queue.finished(leases[0])
        await queue.until(lambda: len(queue.leased) == 4)
        assert all(request.capacity <= 3 for request in queue.requests)

    async def test_cancel(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        marker, mark = marked()
        executor = await start_executor(Setup(command=python(f"{mark}import time; time.sleep(600)")))
        lease = make_lease(ttl_seconds=0.3)
        queue.cancelled.add(lease.lease)
        finish = await queue.run(lease)
        assert (finish.ended, finish.signal) == ("cancelled", 15)
        assert executor.processes(marker) == []

    async def test_a_lost_lease_ends_the_agent_without_a_report(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        marker, mark = marked()
        code = f"{mark}import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        executor = await start_executor(Setup(command=python(code), grace_seconds=0.1))
        lost = await queue.put(make_lease(ttl_seconds=0.3))
        await queue.until(lambda: queue.beats.get(lost.lease, 0) >= 1)
        queue.gone.add(lost.lease)
        await executor.gone(marker)
        other = make_lease(ttl_seconds=0.3)
        queue.cancelled.add(other.lease)
        await queue.run(other)
        assert lost.lease not in queue.finishes

    async def test_the_queue_may_go_away_and_come_back(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        await start_executor(Setup(command=python("import sys; print('up', sys.stdin.read())")))
        first = make_lease()
        await queue.run(first)
        await queue.stop()
        second = await queue.put(make_lease())
        await queue.start()
        assert (await queue.finished(second)).ended == "exited"

    async def test_an_end_while_the_queue_is_away_is_reported_later(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        marker, mark = marked()
        code = f"{mark}import sys, time; print('x', flush=True); time.sleep(0.5)"
        executor = await start_executor(Setup(command=python(code)))
        lease = await queue.put(make_lease())
        await queue.running(lease)
        await queue.stop()
        await executor.gone(marker)
        await queue.start()
        assert (await queue.finished(lease)).output == "x\n"

    async def test_the_end_of_the_run_ends_the_executor(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        marker, mark = marked()
        executor = await start_executor(Setup(command=python(f"{mark}import time; time.sleep(600)"), capacity=2))
        await queue.running(await queue.put(make_lease()))
        await queue.end()
        assert await executor.ended() == 0
        assert executor.processes(marker) == []

    async def test_told_to_stop_it_lets_agents_finish(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        executor = await start_executor(Setup(command=python("import time; time.sleep(0.5); print('done')")))
        lease = await queue.put(make_lease())
        await queue.running(lease)
        await executor.stop()
        assert queue.finishes[lease.lease].output == "done\n"

    async def test_told_to_stop_it_cancels_agents_that_take_too_long(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        executor = await start_executor(Setup(command=python("import time; time.sleep(600)"), drain_seconds=0.2))
        lease = await queue.put(make_lease())
        await queue.running(lease)
        await executor.stop()
        assert queue.finishes[lease.lease].ended == "cancelled"

    async def test_told_to_stop_it_does_not_wait_for_agents_of_a_queue_that_is_gone(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        marker, mark = marked()
        executor = await start_executor(
            Setup(command=python(f"{mark}import time; time.sleep(600)"), drain_seconds=600.0)
        )
        lease = await queue.put(make_lease(ttl_seconds=0.6))
        await queue.until(lambda: queue.beats.get(lease.lease, 0) >= 1)
        await queue.stop()
        await executor.stop()
        assert executor.processes(marker) == []

    async def test_an_agent_does_not_outlive_its_lease(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        marker, mark = marked()
        executor = await start_executor(Setup(command=python(f"{mark}import time; time.sleep(600)")))
        lease = await queue.put(make_lease(ttl_seconds=0.6))
        await queue.until(lambda: queue.beats.get(lease.lease, 0) >= 1)
        await queue.stop()
        await executor.gone(marker)
        await queue.start()
        assert (await queue.run(make_lease({"question": "next"}, deadline_seconds=0.5))).ended == "deadline"
        assert lease.lease not in queue.finishes

    @pytest.mark.parametrize(
        "escape",
        ["pass", "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))"],
        ids=["plain", "daemon"],
    )
    async def test_killed_it_takes_its_agents_along(
        self, start_executor: StartExecutor, queue: FakeQueue, escape: str
    ) -> None:
        marker, mark = marked()
        code = f"{mark}import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\n{escape}\ntime.sleep(600)"
        executor = await start_executor(Setup(command=python(code), apart=True, drain_seconds=0.0))
        leases: list[Lease] = [await queue.put(make_lease(ttl_seconds=0.3)) for _ in range(2)]
        await queue.until(lambda: all(queue.beats.get(lease.lease, 0) >= 2 for lease in leases))
        async with asyncio.timeout(20):  # a lease beats before its agent is there
            while len(executor.processes(marker)) < (2 if escape == "pass" else 4):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        executor.kill()
        await executor.gone(marker)


class ExecutedAgentContract:
    """For agents that are executed: any program, found in PATH or not."""

    async def run(self, start: StartExecutor, queue: FakeQueue, command: list[str], **setup: Any) -> Finish:
        await start(Setup(command=command, **setup))
        return await queue.run(make_lease())

    async def test_a_shell_command(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(start_executor, queue, ["sh", "-c", 'echo "$0 $1"; exit 4', "a b"], args=["$HOME"])
        assert (finish.output, finish.exit_code) == ("a b $HOME\n", 4)

    async def test_an_agent_that_ends_its_guardian_at_once_has_failed(
        self, start_executor: StartExecutor, queue: FakeQueue
    ) -> None:
        """Before that can say that the agent runs."""
        await start_executor(Setup(command=["sh", "-c", "kill -9 $PPID; exec sleep 600"]))
        leases = [await queue.put(make_lease()) for _ in range(8)]
        assert {(await queue.finished(lease)).ended for lease in leases} == {"signalled"}

    @pytest.mark.parametrize(
        ("prepare", "command", "message"),
        [
            ("", "no-such-program", "command no-such-program: not found in PATH="),
            ("", "/no/such/program", "command /no/such/program: does not exist"),
            ("touch tool", "./tool", "command ./tool: not executable (Permission denied); chmod +x"),
            ("mkdir -p tool", "./tool", "command ./tool: not executable"),
            ("echo hi > tool; chmod +x tool", "./tool", "neither a program nor a script with an interpreter"),
            ("echo '#!/no/such' > tool; chmod +x tool", "./tool", "the interpreter named in its first line"),
        ],
    )
    async def test_a_command_that_cannot_be_started(  # noqa: PLR0917
        self, start_executor: StartExecutor, queue: FakeQueue, folder: str, prepare: str, command: str, message: str
    ) -> None:
        if prepare:
            executor = await start_executor(Setup(command=["sh", "-c", prepare], working_dir=folder))
            assert (await queue.run(make_lease())).exit_code == 0
            await executor.stop()
        finish = await self.run(start_executor, queue, [command], working_dir=folder)
        assert (finish.ended, finish.exit_code) == ("startFailed", None)
        assert finish.message is not None
        assert message in finish.message

    @pytest.fixture
    def folder(self) -> str:
        """A folder in which agents of several executors meet."""
        raise NotImplementedError

    async def test_a_working_folder_that_does_not_exist(self, start_executor: StartExecutor, queue: FakeQueue) -> None:
        finish = await self.run(start_executor, queue, ["true"], working_dir="/no/such/folder")
        assert finish.ended == "startFailed"
        assert finish.message == "working folder /no/such/folder: No such file or directory"

    @pytest.mark.parametrize("delivery", ["environment", "argument"])
    @pytest.mark.parametrize(("text", "message"), [("x" * 200_000, "too long"), ("a\0b", "null")])
    async def test_a_task_that_fits_no_argument(
        self, start_executor: StartExecutor, queue: FakeQueue, delivery: str, text: str, message: str
    ) -> None:
        protocol = {"task": {"from": delivery, "format": "text", "field": "q"}}
        await start_executor(Setup(command=["true"], protocol=protocol))
        finish = await queue.run(make_lease({"q": text}))
        assert finish.ended == "startFailed"
        assert finish.message is not None
        assert message in finish.message
        assert "use agentProtocol.task.from: file or stdin" in finish.message
