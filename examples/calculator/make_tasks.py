"""Write the tasks of the calculator example: tasks/train.jsonl and tasks/validation.jsonl.

Each row is {"question": …, "answer": "Answer: 144"}; the run hides `answer` from the agent. Validation uses only
pairs of numbers that never occur in training. The same arguments always give the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from word_problems import VARIANTS, Problem, Variant, draw_problem

TRAIN_ROWS: dict[Variant, int] = {"ci": 512, "full": 2048}
VALIDATION_ROWS = 200


def draw_tasks(variant: Variant, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Distinct problems for training and for validation, which has the held-out pairs of numbers alone."""
    rng = random.Random(f"tasks {variant} {seed}")
    train: dict[str, Problem] = {}
    validation: dict[str, Problem] = {}
    while len(train) < TRAIN_ROWS[variant] or len(validation) < VALIDATION_ROWS:
        problem = draw_problem(rng, variant)
        rows, wanted = (validation, VALIDATION_ROWS) if problem.held_out else (train, TRAIN_ROWS[variant])
        if len(rows) < wanted:
            rows[problem.question] = problem
    return list(train.values()), list(validation.values())


def to_jsonl(problems: Sequence[Problem]) -> str:
    rows = ({"question": problem.question, "answer": f"Answer: {problem.answer}"} for problem in problems)
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="ci", help="ci: one-step questions; full: two-step too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tasks", metavar="FOLDER")
    options = parser.parse_args(arguments)
    train, validation = draw_tasks(options.variant, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train), ("validation", validation)):
        path = options.out / f"{name}.jsonl"
        path.write_text(to_jsonl(problems), encoding="utf-8")
        print(f"{path}: {len(problems)} tasks")


if __name__ == "__main__":
    main()
