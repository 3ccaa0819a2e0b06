"""The agents of `e2e/agents`, as scripts for `python3 -c`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "agents"
_SHARED: Final = re.compile(r"^from asking import .*\n", re.MULTILINE)


def script(name: str) -> str:
    """The text of an agent, with what it imports from `asking` in it: an image of Python alone runs it."""
    shared = (FOLDER / "asking.py").read_text()
    return _SHARED.sub(lambda _: shared, (FOLDER / f"{name}.py").read_text())
