"""How a benchmark says what it measured: the machine, the method, figures against allowed ranges, table or JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from bench.pace import Pace


@dataclass(frozen=True)
class Figure:
    """One measured number. `bound` is the allowed range: (least, greatest), None where open."""

    name: str
    value: float
    unit: str
    bound: tuple[float | None, float | None]

    @property
    def within(self) -> bool:
        least, greatest = self.bound
        return (least is None or self.value >= least) and (greatest is None or self.value <= greatest)


def load_ranges(path: Path, pace: Pace | None = None) -> dict[str, tuple[float | None, float | None]]:
    """Of a file, or of the `ranges.yaml` in a benchmark's folder: name → {min: …, max: …, paced: …}.

    What is paced is stretched by `pace` (`bench.pace`): a least rate divided by it, a greatest time multiplied.
    """
    raw = yaml.safe_load((path / "ranges.yaml" if path.is_dir() else path).read_text())
    return {
        name: _range(entry, pace[entry["paced"]] if pace and "paced" in entry else 1.0) for name, entry in raw.items()
    }


def _range(entry: Mapping[str, Any], pace: float) -> tuple[float | None, float | None]:
    least, greatest = entry.get("min"), entry.get("max")
    return (least and least / pace, greatest and greatest * pace)


def machine(packages: Sequence[str] = (), pace: Pace | None = None) -> dict[str, str]:
    """What the figures were measured on; with its `bench.pace`, where bounds were stretched by it."""
    versions = {package: importlib.metadata.version(package) for package in packages}
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": _cpu_model(),
        "cores": str(cores),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
        **{f"pace ({name})": f"{slower:.2f}" for name, slower in (pace or {}).items()},
        "python": platform.python_version(),
        **versions,
    }


def report(title: str, method: str, figures: Sequence[Figure], machine_: Mapping[str, str], output: str) -> int:
    """Print the figures (`output`: table or json); 0 when all are within their ranges, else 1."""
    if output == "json":
        document = {
            "title": title,
            "method": method,
            "machine": dict(machine_),
            "figures": [{**asdict(figure), "within": figure.within} for figure in figures],
        }
        print(json.dumps(document))
    else:
        _print_table(title, method, figures, machine_)
    return 0 if all(figure.within for figure in figures) else 1


def _print_table(title: str, method: str, figures: Sequence[Figure], machine_: Mapping[str, str]) -> None:
    table = Table(title=title, caption=method, title_justify="left", caption_justify="left")
    for column in ("figure", "value", "unit", "allowed", ""):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in figures:
        least, greatest = figure.bound
        allowed = " ".join(
            part
            for part in (f"≥ {least:g}" if least is not None else "", f"≤ {greatest:g}" if greatest is not None else "")
            if part
        )
        table.add_row(figure.name, f"{figure.value:,.4g}", figure.unit, allowed, "ok" if figure.within else "OUTSIDE")
    console = Console(width=130)
    console.print(table)
    console.print("machine: " + ", ".join(f"{key} {value}" for key, value in machine_.items()), style="dim")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
