"""What the operator costs. It runs as on a cluster, on one core; the API server, in memory, and the trainers are here.

reconcile: median CPU of one look at a run with 2,000 rollout pods while nothing changes, observation, decision and
comparison with what is there; of isolation Job, 2,000 Jobs with a pod and a Secret each. And of one look at its pool.
200 runs: 2,000 rollout pods, 1,005 of them of one run, and 800 of the other parts, each 10 kB as the API server sends
it. Brought up from nothing; then a new operator on what is there, which lists and looks at everything three times; then
another, with 10,000 changes of pods in 30 s while every trainer says something new whenever it is asked.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.operator import decision, load
from bench.pace import faster, pace
from bench.report import Figure, load_ranges, machine, report

PODS = 2_000
_UNITS = {
    "reconcile": "ms",
    "memory": "MB",
    "writes": "",
    "status writes": "1/s",
    "other writes": "",
}


def _unit(name: str) -> str:
    """By the longest beginning that fits; else seconds."""
    fitting = [key for key in _UNITS if name.startswith(key)]
    return _UNITS[max(fitting, key=len)] if fitting else "s"


async def measure(folder: Path) -> dict[str, float]:
    return await decision.measure(PODS) | await load.measure(folder)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    before = pace()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(Path(folder)))
    found = faster(before, pace())
    ranges = load_ranges(Path(__file__).parent, found)
    described = machine(["kopf", "kubernetes", "aiohttp", "pydantic"], found)
    figures = [Figure(name, value, _unit(name), ranges[name]) for name, value in measured.items()]
    return report("operator", __doc__ or "", figures, described, options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
