"""Every benchmark, one after the other, each in a process of its own; exit 1 when a figure lies outside its range."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    rows = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__main__.py"))
    outside = [
        row for row in rows if subprocess.run([sys.executable, "-m", f"bench.{row}"], check=False).returncode != 0
    ]
    print(f"{len(rows) - len(outside)} passed, {len(outside)} failed" + (f": {', '.join(outside)}" if outside else ""))
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
