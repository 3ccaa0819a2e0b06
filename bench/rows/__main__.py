"""10 M prompt and reply tokens of 50-turn rollouts, merged by exact ids and packed with advantages and weights."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.report import Figure, load_ranges, machine, report
from kitestring_rollout.traces.records import VersionSpan
from kitestring_trainer.samples.batches import SampleRules, ScoredRollout, make_samples
from kitestring_trainer.samples.rows import RowLimits
from kitestring_trainer.samples.transitions import Transition

TURNS = 50
REPLY = 40
OBSERVATION = 20
GROUP = 8
TOKENS = 10_000_000


def _rollout(index: int, random: np.random.Generator) -> ScoredRollout:
    context = random.integers(0, 150_000, 200, np.int32)
    made = []
    for seq in range(1, TURNS + 1):
        reply = random.integers(0, 150_000, REPLY, np.int32)
        made.append(
            Transition(
                rollout=f"r{index:06d}",
                attempt=f"a{index:06d}",
                seq=seq,
                choice=0,
                policy="policy",
                agent=None,
                prompt_ids=context,
                response_ids=reply,
                logprobs=np.full(REPLY, -0.5, np.float32),
                versions=(VersionSpan("1.0", 0, REPLY),),
                finish_reason="stop",
                excluded=None,
            )
        )
        context = np.concatenate([context, reply, random.integers(0, 150_000, OBSERVATION, np.int32)])
    return ScoredRollout(f"r{index:06d}", f"g{index // GROUP:06d}", float(index % 2), tuple(made))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rows", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    random = np.random.default_rng(0)
    rollouts: list[ScoredRollout] = []
    tokens = 0
    while tokens < TOKENS:
        rollout = _rollout(len(rollouts), random)
        tokens += sum(len(t.prompt_ids) + len(t.response_ids) for t in rollout.transitions)
        rollouts.append(rollout)
    rules = SampleRules("grpo", True, 2, RowLimits(prompt=1_000, response=10_000), updates=4)
    start = time.perf_counter()
    samples = make_samples(1, "1.0", rollouts, rules)
    seconds = (time.perf_counter() - start) * TOKENS / tokens
    if samples.rows_per_rollout != 1.0:
        raise RuntimeError(f"expected one row per rollout, found {samples.rows_per_rollout}")
    name = "seconds for 10 M tokens"
    return report(
        "rows",
        f"{len(rollouts)} rollouts of {TURNS} turns, {tokens:,} tokens as sent and answered, scaled to 10 M; one run",
        [Figure(name, seconds, "s", load_ranges(Path(__file__).parent)[name])],
        machine(["numpy"]),
        options.output,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
