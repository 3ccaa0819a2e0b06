"""Benchmarks, one after the other, each in a process of its own: all, or those that are named.

Exit 1 when a figure lies outside its range in each of three tries: what a neighbour on the machine did passes, what the
code does stays. Every try is printed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TRIES = 3


def _within(row: str) -> bool:
    return subprocess.run([sys.executable, "-m", f"bench.{row}"], check=False).returncode == 0


def main(names: Sequence[str]) -> int:
    known = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__main__.py"))
    if unknown := set(names) - set(known):
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    rows = names or known
    outside = [row for row in rows if not any(_within(row) for _ in range(TRIES))]
    print(f"{len(rows) - len(outside)} passed, {len(outside)} failed" + (f": {', '.join(outside)}" if outside else ""))
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
