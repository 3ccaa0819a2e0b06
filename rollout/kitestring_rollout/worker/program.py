"""Reading a command line as a Python program, for agents that are forked from preloaded modules. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_FLAGS = frozenset("bBdEIOPqRsSuv")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class NotAPython(ValueError):
    """The command cannot be forked from a launcher; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """`interpreter options… (script | -m module | -c text) arguments…`"""

    interpreter: str
    options: tuple[str, ...]
    kind: Literal["script", "module", "code"]
    target: str
    argv: tuple[str, ...]
    """As the program sees it in `sys.argv`."""


def python_program(command: Sequence[str]) -> PythonProgram:
    """The parts of a command whose first word is a Python interpreter; NotAPython when it is anything else."""
    interpreter, words = command[0], list(command[1:])
    if not _INTERPRETER.fullmatch(PurePath(interpreter).name):
        raise NotAPython(
            f"agentProtocol.preload needs a command that starts with a Python interpreter, found {interpreter!r}; "
            "write e.g. command: [python, agent.py], or remove preload"
        )
    options: list[str] = []
    while words:
        word = words.pop(0)
        if word in _WITH_VALUE and words:
            options += [word, words.pop(0)]
        elif word[:2] in ("-m", "-c"):
            target = word[2:] or (words.pop(0) if words else "")
            if target:
                kind: Literal["module", "code"] = "module" if word[1] == "m" else "code"
                return PythonProgram(interpreter, tuple(options), kind, target, (word[:2], *words))
        elif word.startswith(_WITH_VALUE) or (word[:1] == "-" and word != "-" and _FLAGS.issuperset(word[1:])):
            options.append(word)
        elif word.startswith("-"):
            raise NotAPython(
                f"agentProtocol.preload does not know the option {word!r} of the interpreter; "
                "allowed: -b -B -d -E -I -O -P -q -s -S -u -v -W -X -m -c; remove the option, or remove preload"
            )
        else:
            return PythonProgram(interpreter, tuple(options), "script", word, (word, *words))
    raise NotAPython(
        "agentProtocol.preload needs a program to run: command: [python, agent.py], [python, -m, module] or "
        "[python, -c, text]; add it, or remove preload"
    )
