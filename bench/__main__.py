"""Benchmarks, one after the other, each in a process of its own: all, or those that are named.

Exit 1 when a figure lies outside its range.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def main(names: Sequence[str]) -> int:
    known = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__main__.py"))
    if unknown := set(names) - set(known):
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    rows = names or known
    outside = [row for row in rows if subprocess.run([sys.executable, "-m", f"bench.{row}"], check=False).returncode]
    print(f"{len(rows) - len(outside)} passed, {len(outside)} failed" + (f": {', '.join(outside)}" if outside else ""))
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
