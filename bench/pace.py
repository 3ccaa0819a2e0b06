"""How fast the machine is now, against the one that the bounds were set on.

A bound in seconds says nothing on a machine of another speed, nor on the same one while a neighbour has its caches. So
bounds that are times near what is measured (`paced: compute` or `paced: processes` in a `ranges.yaml`) are stretched by
how much more CPU time a fixed piece of work takes in the same run than it took there: what our processes do all day, by
the standard library alone, so that no change of ours can change it. They are never tightened nor more than doubled; the
report says the pace. Waiting for a core takes no CPU time: what waits for one is not excused.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final

Pace = Mapping[str, float]
"""Times slower than the reference, at least 1, at most MOST, of each kind of work."""

REFERENCE_SECONDS: Final = {"compute": 0.0100, "processes": 0.0182}
"""Medians on two cores of an AMD EPYC, Python 3.11.7, idle."""
MOST: Final = 2.0
"""On a machine that is slower still, the bounds judge nothing and fail."""
ROUNDS: Final = 15
_DOCUMENT: Final = {f"key-{number}": {"text": "x" * 40, "numbers": list(range(40))} for number in range(100)}


def pace() -> Pace:
    """Measured in a process of its own: what the caller has in memory would make each fork dearer."""
    done = subprocess.run([sys.executable, "-m", __name__], check=True, capture_output=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return {name: min(MOST, max(1.0, seconds[name] / known)) for name, known in REFERENCE_SECONDS.items()}


def faster(one: Pace, other: Pace) -> Pace:
    """Of what was measured before and after something, what excuses less."""
    return {name: min(one[name], other[name]) for name in one}


def measure() -> dict[str, float]:
    """CPU seconds of each kind of work, medians."""
    return {"compute": _median(_compute), "processes": _median(_processes)}


def _median(work: Callable[[], None]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = _cpu_seconds()
        work()
        times.append(_cpu_seconds() - begun)
    return statistics.median(times)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _compute() -> None:
    for _ in range(20):
        text = json.dumps(_DOCUMENT)
        hashlib.sha256(text.encode()).digest()
        sorted(json.loads(text), reverse=True)


def _processes() -> None:
    for _ in range(10):
        os.waitpid(os.posix_spawnp("true", ["true"], os.environ), 0)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    print(json.dumps(measure()))
