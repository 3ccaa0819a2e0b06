"""The word problems of the calculator example: a question, and the operations that answer it.

Plain data and a given `random.Random`; nothing here touches files or a model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Sign = Literal["+", "-", "*"]
Variant = Literal["ci", "full"]
SIGNS: tuple[Sign, ...] = ("+", "-", "*")
VARIANTS: tuple[Variant, ...] = ("ci", "full")

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ivy", "Jon")
OBJECTS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
CONTAINERS = ("bags", "boxes", "crates", "jars")

ONE_STEP: dict[Sign, tuple[str, ...]] = {
    "+": (
        "{n} has {a} {o} and gets {b} more. How many {o} now?",
        "{n} finds {a} {o} and then {b} others. How many {o} in all?",
        "{a} {o} are joined by {b} {o}. How many {o}?",
    ),
    "-": (
        "From {a} {o}, {b} are lost. How many remain?",
        "{n} has {a} {o} and gives away {b}. How many are left?",
        "{n} had {a} {o} and sold {b}. How many {o} remain?",
    ),
    "*": (
        "There are {a} {x} with {b} {o} each. How many {o}?",
        "{n} fills {a} {x} with {b} {o} each. How many {o}?",
        "Each of {a} {x} holds {b} {o}. How many {o} in all?",
    ),
}


@dataclass(frozen=True)
class Operation:
    """One use of the calculator. `None` stands for the result of the operation before it."""

    left: int | None
    sign: Sign
    right: int | None

    def expression(self, previous: int = 0) -> str:
        """What goes into the calculator, for example `48*3`."""
        left = previous if self.left is None else self.left
        right = previous if self.right is None else self.right
        return f"{left}{self.sign}{right}"

    def result(self, previous: int = 0) -> int:
        left = previous if self.left is None else self.left
        right = previous if self.right is None else self.right
        match self.sign:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right


@dataclass(frozen=True)
class Problem:
    """A question with one or two operations; the first one always has both its numbers."""

    question: str
    operations: tuple[Operation, ...]

    @property
    def answer(self) -> int:
        result = 0
        for operation in self.operations:
            result = operation.result(result)
        return result

    @property
    def held_out(self) -> bool:
        """Whether the first pair of numbers is kept for validation: one ordered pair in five."""
        first = self.operations[0]
        if first.left is None or first.right is None:
            raise ValueError(f"the first operation of a problem needs two numbers, not {first}")
        return (31 * first.left + 17 * first.right) % 5 == 0


def draw_problem(rng: random.Random, variant: Variant) -> Problem:
    """Draw a problem: one step in the variant `ci`; one or two, evenly, in `full`."""
    if variant == "full" and rng.random() < 0.5:
        return _two_steps(rng)
    return _one_step(rng)


def _plus(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 30), rng.randint(2, 30)


def _minus(rng: random.Random) -> tuple[int, int]:
    a = rng.randint(10, 30)
    return a, rng.randint(2, min(20, a - 1))


def _times(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 9), rng.randint(2, 9)


def _one_step(rng: random.Random) -> Problem:
    sign = rng.choice(SIGNS)
    a, b = {"+": _plus, "-": _minus, "*": _times}[sign](rng)
    words = {"n": rng.choice(NAMES), "o": rng.choice(OBJECTS), "x": rng.choice(CONTAINERS)}
    question = rng.choice(ONE_STEP[sign]).format(a=a, b=b, **words)
    return Problem(question, (Operation(a, sign, b),))


def _two_steps(rng: random.Random) -> Problem:
    n, o, x = rng.choice(NAMES), rng.choice(OBJECTS), rng.choice(CONTAINERS)
    match rng.randrange(5):
        case 0:
            a, b = _times(rng)
            c = rng.randint(2, 30)
            question = f"{n} has {c} {o} and buys {a} {x} with {b} {o} each. How many {o} now?"
            return Problem(question, (Operation(a, "*", b), Operation(c, "+", None)))
        case 1:
            a, b = _times(rng)
            c = rng.randint(1, a * b - 1)
            question = f"{n} buys {a} {x} with {b} {o} each and gives away {c}. How many {o} are left?"
            return Problem(question, (Operation(a, "*", b), Operation(None, "-", c)))
        case 2:
            a, b = _plus(rng)
            c = rng.randint(2, min(30, a + b - 1))
            question = f"{n} has {a} {o}, gets {b} and gives away {c}. How many {o} are left?"
            return Problem(question, (Operation(a, "+", b), Operation(None, "-", c)))
        case 3:
            a, b = _plus(rng)
            c = rng.randint(2, min(30, a + b - 1))
            question = f"Of {a} red and {b} blue {o}, {c} are lost. How many remain?"
            return Problem(question, (Operation(a, "+", b), Operation(None, "-", c)))
        case _:
            a, b = _minus(rng)
            c = rng.randint(2, 30)
            question = f"{n} has {a} {o}, gives away {b} and gets {c}. How many {o} now?"
            return Problem(question, (Operation(a, "-", b), Operation(None, "+", c)))
