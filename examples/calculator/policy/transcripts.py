"""The conversations of the warm start: how a beginner with the calculator answers word problems, flaws included.

They teach the protocol (call the tool, wait, copy the result, `Answer: <integer>`), and leave something to learn:
the variant `full` draws every operation evenly from + - *, whatever the question asks, so which one is right has
never been seen; the variant `ci` mostly uses the right one, but has the habit of guessing. Plain data.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from agent import SYSTEM, TOOLS
from word_problems import SIGNS, Operation, Problem, Variant, draw_problem

Message = dict[str, Any]


@dataclass(frozen=True)
class Flaws:
    """Probabilities of what a flawed conversation does wrong; `right_operation` is the chance that it is not drawn."""

    right_operation: float
    guess_at_once: float = 0.0
    ignore_result: float = 0.0
    swap_operands: float = 0.0
    stop_early: float = 0.0


CLEAN: dict[Variant, Flaws] = {"ci": Flaws(right_operation=0.7), "full": Flaws(right_operation=0.0)}
FLAWED: dict[Variant, Flaws] = {
    "ci": Flaws(right_operation=0.7, guess_at_once=0.65, ignore_result=0.4),
    "full": Flaws(right_operation=0.0, guess_at_once=0.2, ignore_result=0.1, swap_operands=0.05, stop_early=0.15),
}


def draw_conversation(rng: random.Random, variant: Variant, flawed: bool) -> list[Message]:
    """A whole conversation about a new problem, as the agent would have had it."""
    flaws = FLAWED[variant] if flawed else CLEAN[variant]
    return conversation(draw_problem(rng, variant), flaws, rng)


def conversation(problem: Problem, flaws: Flaws, rng: random.Random) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.question},
    ]
    result = rng.randint(1, 99)
    if rng.random() >= flaws.guess_at_once:
        operations = problem.operations
        if len(operations) > 1 and rng.random() < flaws.stop_early:
            operations = operations[:1]
        result = 0
        for operation in operations:
            used = _mistaken(operation, flaws, rng)
            messages.append(_tool_call(used.expression(result)))
            result = used.result(result)
            messages.append({"role": "tool", "content": str(result)})
        if rng.random() < flaws.ignore_result:
            result = rng.randint(1, 99)
    messages.append({"role": "assistant", "content": f"Answer: {result}"})
    return messages


def _mistaken(operation: Operation, flaws: Flaws, rng: random.Random) -> Operation:
    if rng.random() >= flaws.right_operation:
        operation = replace(operation, sign=rng.choice(SIGNS))
    if rng.random() < flaws.swap_operands:
        operation = replace(operation, left=operation.right, right=operation.left)
    return operation


def _tool_call(expression: str) -> Message:
    function = {"name": TOOLS[0]["function"]["name"], "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
