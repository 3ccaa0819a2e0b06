"""The tasks of the calculator example: right answers, and validation on numbers that training never sees."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import make_tasks
import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_problems import VARIANTS, Operation, Problem, Variant, draw_problem

# How a reader would answer: by the words of the question, independently of how it was drawn.
READINGS: list[tuple[str, Callable[..., int]]] = [
    (r"has (\d+) \w+ and buys (\d+) \w+ with (\d+) \w+ each\. .* now", lambda c, a, b: c + a * b),
    (r"buys (\d+) \w+ with (\d+) \w+ each and gives away (\d+)\. .* left", lambda a, b, c: a * b - c),
    (r"has (\d+) \w+, gets (\d+) and gives away (\d+)\. .* left", lambda a, b, c: a + b - c),
    (r"Of (\d+) red and (\d+) blue \w+, (\d+) are lost\. .* remain", lambda a, b, c: a + b - c),
    (r"has (\d+) \w+, gives away (\d+) and gets (\d+)\. .* now", lambda a, b, c: a - b + c),
    (r"has (\d+) \w+ and gets (\d+) more\. .* now", lambda a, b: a + b),
    (r"finds (\d+) \w+ and then (\d+) others\. .* in all", lambda a, b: a + b),
    (r"^(\d+) \w+ are joined by (\d+) \w+\.", lambda a, b: a + b),
    (r"From (\d+) \w+, (\d+) are lost\. .* remain", lambda a, b: a - b),
    (r"has (\d+) \w+ and gives away (\d+)\. .* left", lambda a, b: a - b),
    (r"had (\d+) \w+ and sold (\d+)\. .* remain", lambda a, b: a - b),
    (r"There are (\d+) \w+ with (\d+) \w+ each\.", lambda a, b: a * b),
    (r"fills (\d+) \w+ with (\d+) \w+ each\.", lambda a, b: a * b),
    (r"Each of (\d+) \w+ holds (\d+) \w+\.", lambda a, b: a * b),
]


def read(question: str) -> int:
    found = [
        answer(*map(int, match.groups())) for pattern, answer in READINGS if (match := re.search(pattern, question))
    ]
    assert len(found) == 1, f"{question!r} can be read in {len(found)} ways"
    return found[0]


@given(st.integers(), st.sampled_from(VARIANTS))
def test_the_answer_is_what_a_reader_finds(seed: int, variant: Variant) -> None:
    problem = draw_problem(random.Random(seed), variant)
    assert problem.answer == read(problem.question)
    assert problem.answer > 0


def test_every_phrasing_is_drawn() -> None:
    rng = random.Random(0)
    questions = [draw_problem(rng, "full").question for _ in range(2000)]
    for pattern, _ in READINGS:
        assert any(re.search(pattern, question) for question in questions), pattern


def test_operations_chain_through_the_result_before() -> None:
    problem = Problem("?", (Operation(5, "*", 4), Operation(7, "+", None)))
    assert problem.answer == 27
    assert problem.operations[0].expression() == "5*4"
    assert problem.operations[1].expression(20) == "7+20"


@pytest.mark.parametrize("pair, held_out", [((2, 4), True), ((4, 2), False), ((3, 1), True), ((5, 5), True)])
def test_one_ordered_pair_in_five_is_held_out(pair: tuple[int, int], held_out: bool) -> None:
    assert Problem("?", (Operation(pair[0], "+", pair[1]),)).held_out is held_out


@pytest.mark.parametrize("variant, steps", [("ci", {1}), ("full", {1, 2})])
def test_training_and_validation_share_no_pair_of_numbers(variant: Variant, steps: set[int]) -> None:
    train, validation = make_tasks.draw_tasks(variant, seed=0)
    assert len(train) == make_tasks.TRAIN_ROWS[variant]
    assert len(validation) == make_tasks.VALIDATION_ROWS
    assert {len(problem.operations) for problem in train + validation} == steps

    def pairs(problems: list[Problem]) -> set[tuple[int | None, int | None]]:
        return {(problem.operations[0].left, problem.operations[0].right) for problem in problems}

    assert not pairs(train) & pairs(validation)
    questions = [problem.question for problem in train + validation]
    assert len(set(questions)) == len(questions)


def test_the_files_hold_question_and_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tasks.main(["--out", str(tmp_path / "tasks")])
    rows = [json.loads(line) for line in (tmp_path / "tasks" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == make_tasks.TRAIN_ROWS["ci"]
    for row in rows:
        assert row == {"question": row["question"], "answer": f"Answer: {read(row['question'])}"}
    assert "200 tasks" in capsys.readouterr().out


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_tasks.main(["--variant", "full", "--seed", "3", "--out", str(tmp_path / name)])
    make_tasks.main(["--variant", "full", "--seed", "4", "--out", str(tmp_path / "c")])
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()
