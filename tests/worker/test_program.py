from __future__ import annotations

import pytest

from kitestring_rollout.worker.program import NotAPython, PythonProgram, python_program


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python agent.py", ("python", (), "script", "agent.py", ("agent.py",))),
        ("python3.11 -u agent.py -x --y", ("python3.11", ("-u",), "script", "agent.py", ("agent.py", "-x", "--y"))),
        ("/opt/venv/bin/python -m pkg.agent a", ("/opt/venv/bin/python", (), "module", "pkg.agent", ("-m", "a"))),
        ("python -mpkg", ("python", (), "module", "pkg", ("-m",))),
        ("python -c print(1) -m", ("python", (), "code", "print(1)", ("-c", "-m"))),
        (
            "python -W error -X dev -Wd s.py",
            ("python", ("-W", "error", "-X", "dev", "-Wd"), "script", "s.py", ("s.py",)),
        ),
        ("python -Bsu s.py", ("python", ("-Bsu",), "script", "s.py", ("s.py",))),
        ("pypy3 s.py", ("pypy3", (), "script", "s.py", ("s.py",))),
        ("python3.13t s.py", ("python3.13t", (), "script", "s.py", ("s.py",))),
    ],
)
def test_commands(command: str, expected: tuple[object, ...]) -> None:
    assert python_program(command.split()) == PythonProgram(*expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("node agent.js", "starts with a Python interpreter, found 'node'"),
        ("bash -c python", "found 'bash'"),
        ("pythonic agent.py", "found 'pythonic'"),
        ("python", "needs a program to run"),
        ("python -u", "needs a program to run"),
        ("python -m", "needs a program to run"),
        ("python -i s.py", "does not know the option '-i'"),
        ("python --version", "does not know the option '--version'"),
        ("python -", "does not know the option '-'"),
    ],
)
def test_what_cannot_be_forked(command: str, message: str) -> None:
    with pytest.raises(NotAPython, match=message):
        python_program(command.split())
