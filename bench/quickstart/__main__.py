"""`make demo` from a fresh warm start, timed; or, with --run, the figures of a run that `make demo` has made."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Figure, load_ranges, machine, report

ROOT = Path(__file__).parents[2]


def make_demo(seed: int) -> tuple[Path, float]:
    """Run folder and wall seconds, the warm start of the policy included."""
    shutil.rmtree(ROOT / "examples/calculator/model", ignore_errors=True)
    began = time.perf_counter()
    subprocess.run(["make", "demo", f"SEED={seed}"], cwd=ROOT, check=True, stdout=sys.stderr)
    return (ROOT / "runs/latest").resolve(), time.perf_counter() - began


def figures_of(run: Path, wall_seconds: float) -> dict[str, float]:
    """What the run came to. Raises when it did not succeed or a figure is not there."""
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    if result["phase"] != "Succeeded":
        raise RuntimeError(f"{run}: {result['phase']}: {result['reason']} {result['message']}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "agreement_tokens" in line]
    if len(steps) != result["steps"]:
        raise RuntimeError(f"{run}: {len(steps)} of {result['steps']} steps have figures of an update")
    before, after = result["validation_before"]["sampled"], result["validation_after"]["sampled"]
    return {
        "wall seconds": wall_seconds,
        "validation reward gained (sampled)": after["reward"] - before["reward"],
        "tool use after training (sampled)": after["tool_use"],
        "largest mean KL, sampler against trainer": max(step["agreement_kl_k3_nats"] for step in steps),
        "least correlation, sampler against trainer": min(step["agreement_correlation"] for step in steps),
        "parameters of the checkpoint": parameters(Path(result["checkpoint"])),
    }


def parameters(checkpoint: Path) -> int:
    """Loads the checkpoint as any user of transformers would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(checkpoint)
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(checkpoint).parameters())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quickstart", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", type=Path, help="evaluate this run folder; its own wall seconds are used")
    options = parser.parse_args(argv)
    if options.run is None:
        run, seconds = make_demo(options.seed)
    else:
        run = options.run.resolve()
        seconds = json.loads((run / "result.json").read_text())["wall_seconds"]
    ranges = load_ranges(Path(__file__).parent)
    return report(
        "quick start",
        f"make demo, run {run.name}: warm start (unless --run), validation, 12 steps of 16 x 8 rollouts; one run",
        [Figure(name, value, "", ranges[name]) for name, value in figures_of(run, seconds).items()],
        machine(["verl", "torch", "transformers", "ray"]),
        options.output,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
