"""A forked agent does as it does under `python`, and knows nothing of the agents before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitestring_rollout.protocol.queue import Finish
from tests.worker.conftest import PATH, StartWorker
from tests.worker.executor_contract import Setup
from tests.worker.fake_queue import FakeQueue, make_lease


@pytest.fixture
def preload() -> list[str]:
    return ["decimal"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agents").mkdir()
    return tmp_path / "agents"


async def forked(start: StartWorker, queue: FakeQueue, folder: Path, command: list[str], **setup: Any) -> Finish:
    await start(Setup(command=command, working_dir=str(folder), **setup))
    return await queue.run(make_lease())


def under_python(folder: Path, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": PATH, "LANG": "C.UTF-8", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


SCRIPTS = {
    "identity": (
        "import sys, __main__\n"
        "print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__, __doc__, __main__.x if 0 else 1)\n"
        "print(sorted(vars()), sys.modules['__main__'] is __main__, vars(__main__) is vars())\n"
        "print(sys.executable, sys.flags, sys.stdin.encoding, sys.stdout.encoding, sys.stdout.errors)\n"
        "print(repr(sys.stdin.read()))\n"
    ),
    "sibling": "import sibling; print(sibling.word, sibling.__file__)\n",
    "exit": "import sys; print('x'); sys.exit(7)\n",
    "exit text": "raise SystemExit('so it ends')\n",
    "exit wide": "import sys; sys.exit(256 + 9)\n",
    "exit negative": "import sys; sys.exit(-1)\n",
    "uncaught": "def f(n):\n    1 / n\n\ntry: f(0)\nexcept ArithmeticError as e: raise KeyError('é') from e\n",
    "syntax": "x = 1\nif x\n    print(x)\n",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise ValueError\n",
    "atexit": "import atexit\natexit.register(print, 2)\natexit.register(print, 1)\nraise ValueError('no')\n",
    "atexit exit": "import atexit, os\natexit.register(os._exit, 5)\n",
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')\n"
    ),
    "daemon": (
        "import threading, time\nf = open('out.txt', 'w'); f.write('kept')\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('main')\n"
    ),
    "open file": "f = open('out.txt', 'w')\nf.write('kept')\nf.seek\n",
    "open file of a function": "f = open('out.txt', 'w')\nf.write('kept')\ndef g(): return f\n",
    "open file of a sibling": "import keeper\n",
    "finalizer": "class A:\n    def __del__(self): print('gone', name)\nname = 'a'\na = A()\n",
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print('x')\nasyncio.run(main())\n",
    "processes": (
        "import multiprocessing, sys\n\ndef f(x):\n    return x * x\n\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(f, [1, 2, 3]))\n"
    ),
    "subprocess": "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(5)']))\n",
    "closed stdout": "import sys\nprint('x')\nsys.stdout.close()\n",
    "pickle": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A)\n",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nprint(A())\n",
    "annotations": "x: int = 1\nprint(__annotations__)\ndef f(a: int): pass\nprint(f.__annotations__)\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_runs_as_under_python(
    start_executor: StartWorker, queue: FakeQueue, folder: Path, name: str
) -> None:
    (folder / "agent.py").write_text(SCRIPTS[name])
    (folder / "sibling.py").write_text("word = 'sibling'\n")
    (folder / "keeper.py").write_text("f = open('out.txt', 'w')\nf.write('kept')\ndef g(): return f\n")
    command = ["python", "agent.py", "a b", "-u"]
    expected = under_python(folder, command)
    written = (folder / "out.txt").read_text() if (folder / "out.txt").exists() else None
    (folder / "out.txt").unlink(missing_ok=True)
    finish = await forked(start_executor, queue, folder, command)
    assert finish.output == expected.stdout
    log = finish.log_tail.replace(finish.output, "", 1) if finish.output else finish.log_tail
    assert log == expected.stderr
    assert (finish.exit_code, finish.signal) == _ends(expected.returncode)
    if written is not None:
        assert written == "kept"
        assert (folder / "out.txt").read_text() == written


def _ends(code: int) -> tuple[int | None, int | None]:
    return (code, None) if code >= 0 else (None, -code)


PACKAGE = {
    "pkg/__init__.py": "",
    "pkg/__main__.py": "import sys; print('main', __name__, __package__, sys.argv[1:], sys.path[0])",
    "pkg/part.py": "from . import __main__ as m\nimport sys; print(__name__, __spec__.name, sys.argv)\n1 / 0\n",
}


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "pkg", "x"],
        ["python", "-m", "pkg.part"],
        ["python", "-m", "no_such"],
        ["python", "-m", "pkg.no_such"],
        ["python", "-c", "import sys; print(sys.argv, repr(sys.path[0])); 1 / 0", "y"],
        ["python", "missing.py"],
        ["python", "-u", "-O", "-X", "utf8", "-W", "error", "show.py"],
        ["python", "-I", "show.py"],
        ["python", "-E", "-s", "show.py"],
        ["python", "sub/show.py"],
    ],
    ids=" ".join,
)
async def test_every_form_of_command_runs_as_under_python(
    start_executor: StartWorker, queue: FakeQueue, folder: Path, command: list[str]
) -> None:
    show = "import sys; print(sys.flags, sys.argv, sys.path[0], sys.warnoptions, __debug__, sys.stdout.write_through)"
    files = {**PACKAGE, "show.py": show, "sub/show.py": show}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    expected = under_python(folder, command)
    finish = await forked(start_executor, queue, folder, command)
    assert finish.output == expected.stdout
    assert finish.log_tail.replace(finish.output, "", 1) == expected.stderr
    assert finish.exit_code == expected.returncode


async def test_agents_share_nothing(
    start_executor: StartWorker, queue: FakeQueue, folder: Path, preload: list[str]
) -> None:
    preload.append("numpy")
    (folder / "agent.py").write_text(
        "import decimal, numpy, os, random, sys, uuid\n"
        "first = not hasattr(decimal, 'mark'); decimal.mark = 1\n"
        "print(first, random.random(), numpy.random.random(), uuid.uuid4(), os.urandom(4), os.environ['HOME'],\n"
        "      os.popen('echo $KITESTRING_ATTEMPT').read().strip() == os.environ['KITESTRING_ATTEMPT'], sep='\\n')\n"
    )
    await start_executor(Setup(command=["python", "agent.py"], working_dir=str(folder)))
    seen: list[list[str]] = []
    for _ in range(3):
        seen.append((await queue.run(make_lease())).output.split("\n"))
    for lines in zip(*seen, strict=True):
        fixed = lines[0] in ("True", "")
        assert len(set(lines)) == (1 if fixed else 3), lines


async def test_a_module_is_imported_once(start_executor: StartWorker, queue: FakeQueue, folder: Path) -> None:
    (folder / "decimal.py").write_text("import os; open('imports', 'a').write('x'); pid = os.getpid()")
    (folder / "agent.py").write_text("import decimal, os; print(decimal.pid != os.getpid())")
    await start_executor(Setup(command=["python", "agent.py"], working_dir=str(folder)))
    assert [(await queue.run(make_lease())).output for _ in range(3)] == ["True\n"] * 3
    assert (folder / "imports").read_text() == "x"


async def test_a_name_may_lead_to_what_a_module_loads_when_asked(
    start_executor: StartWorker, queue: FakeQueue, folder: Path, preload: list[str]
) -> None:
    preload[:] = ["lazy.Client", "lazy.plain"]
    (folder / "lazy.py").write_text(
        "plain = 1\n"
        "def __getattr__(name):\n"
        "    if name != 'Client': raise AttributeError(name)\n"
        "    import heavy\n"
        "    return heavy\n"
    )
    (folder / "heavy.py").write_text("")
    (folder / "agent.py").write_text("import sys; print('heavy' in sys.modules)")
    finish = await forked(start_executor, queue, folder, ["python", "agent.py"])
    assert finish.output == "True\n"


async def test_what_a_module_opened(start_executor: StartWorker, queue: FakeQueue, folder: Path) -> None:
    """A file stays open for the module; a socket, by which agents could meet, does not."""
    (folder / "decimal.py").write_text(
        "import socket, threading, time\nfile = open(__file__)\nsock = socket.socketpair()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (folder / "agent.py").write_text(
        "import decimal, os\nprint(decimal.file.read(6))\n"
        "try: decimal.sock[0].send(b'x')\nexcept OSError as error: print(error.strerror)\n"
        "for s in decimal.sock: s.detach()\n"
    )
    finish = await forked(start_executor, queue, folder, ["python", "agent.py"])
    assert finish.output == "import\nBad file descriptor\n"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "ModuleNotFoundError: No module named 'decimal_'"),
        ("import no_such.thing", "ModuleNotFoundError: No module named 'no_such'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
async def test_a_module_that_cannot_be_imported(  # noqa: PLR0917
    start_executor: StartWorker, queue: FakeQueue, folder: Path, preload: list[str], module: str | None, message: str
) -> None:
    preload[:] = ["decimal_"]
    if module is not None:
        (folder / "decimal_.py").write_text(module)
    await start_executor(Setup(command=["python", "agent.py"], working_dir=str(folder)))
    for _ in range(2):
        finish = await queue.run(make_lease())
        assert finish.ended == "startFailed"
        assert finish.message == (
            f"agentProtocol.preload: python cannot import decimal_: {message}; "
            "install it for that interpreter, or remove it from preload"
        )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["node", "agent.js"], "starts with a Python interpreter, found 'node'"),
        (["/no/such/python", "agent.py"], "agentProtocol.preload: /no/such/python: No such file or directory"),
        (["python", "-i", "agent.py"], "does not know the option '-i'"),
    ],
)
async def test_a_command_that_cannot_be_preloaded(
    start_executor: StartWorker, queue: FakeQueue, folder: Path, command: list[str], message: str
) -> None:
    finish = await forked(start_executor, queue, folder, command)
    assert finish.ended == "startFailed"
    assert message in (finish.message or "")


async def test_an_interpreter_that_dies_while_it_imports(
    start_executor: StartWorker, queue: FakeQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed for want of memory, say: tried again a few times, then each attempt fails as ours, not the agent's."""
    monkeypatch.setattr("kitestring_rollout.worker.launcher_process.RESTART_SECONDS", 0.01)
    (folder / "decimal.py").write_text("import os; open('tries', 'a').write('x'); os.kill(os.getpid(), 9)")
    finish = await forked(start_executor, queue, folder, ["python", "agent.py"])
    assert finish.ended == "executorLost"
    assert "died 5 times" in (finish.message or "")


async def test_without_a_working_folder_it_is_the_scratch_folder(start_executor: StartWorker, queue: FakeQueue) -> None:
    await start_executor(Setup(command=["python", "-m", "this"]))
    assert (await queue.run(make_lease())).output.startswith("The Zen of Python")


def test_the_launcher_is_one_file_for_python_3_8() -> None:
    import ast

    from kitestring_rollout.launcher import launcher

    tree = ast.parse(Path(launcher.__file__).read_text(), feature_version=(3, 8))
    imported = {
        (node.names[0].name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= sys.stdlib_module_names
