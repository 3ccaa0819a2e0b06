from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api.v1alpha1.reward import BuiltinScorer
from kitestring_rollout.scoring.builtin import builtin_score
from kitestring_rollout.scoring.value import ScoreError


def scored(output: str, answer: Any, **scorer: Any) -> float:
    scorer = {"expectedField": "answer", **scorer}
    if scorer["kind"] == "regex":
        del scorer["expectedField"]
    return builtin_score(BuiltinScorer.model_validate(scorer), output, {"answer": answer})


@pytest.mark.parametrize(
    ("output", "answer", "options", "expected"),
    [
        ("Answer: 144", "Answer: 144", {}, 1),
        ("  Answer: 144\n", "Answer: 144", {}, 1),
        ("Answer: 144 ", "Answer: 144", {"stripWhitespace": False}, 0),
        ("answer: 144", "Answer: 144", {}, 0),
        ("STRASSE", "straße", {"ignoreCase": True}, 1),
        ("144", 144, {}, 1),
        ("144.0", 144, {}, 0),
        ("true", True, {}, 1),
        ("", "", {}, 1),
        ("", "x", {}, 0),
        ("b", ["a", "b"], {}, 1),
        ("c", ["a", "b"], {}, 0),
        ("Ωmega ☃", "Ωmega ☃", {}, 1),
    ],
)
def test_exact_match(output: str, answer: Any, options: dict[str, Any], expected: float) -> None:
    assert scored(output, answer, kind="exactMatch", **options) == expected


@pytest.mark.parametrize(
    ("output", "answer", "tolerance", "expected"),
    [
        ("The answer is 42.", "42", None, 1),
        ("first 41, then 42", 42, None, 1),
        ("42 apples, not 41", 42, None, 0),
        ("-7", -7, None, 1),
        ("5-3", 3, None, 1),
        ("minus −7", -7, None, 1),
        ("1,234,567", 1234567, None, 1),
        ("1,2,3", 3, None, 1),
        ("12,34", 34, None, 1),
        ("3.14159", 3.14, 0.01, 1),
        ("3.16", 3.14, 0.01, 0),
        ("0.3", 0.1 + 0.2, None, 0),
        ("0.3", 0.1 + 0.2, 1e-9, 1),
        ("1e3", 1000, None, 1),
        ("6.02E23", "6.02e23", None, 1),
        ("9007199254740993", 9007199254740993, None, 1),
        ("9007199254740992", 9007199254740993, None, 0),
        ("no number", 1, None, 0),
        ("", 1, None, 0),
        ("nan", 1, None, 0),
        ("Infinity", 1, None, 0),
        ("1e9999", 1, 5.0, 0),
        ("9" * 5000, 1, None, 0),
        ("x2", 2, None, 0),
        ("$2", 2, None, 1),
        ("answer:42", "Answer: 42", None, 1),
    ],
)
def test_numeric(output: str, answer: Any, tolerance: float | None, expected: float) -> None:
    assert scored(output, answer, kind="numeric", tolerance=tolerance) == expected


@pytest.mark.parametrize("answer", [True, None, "forty-two", [42], {"a": 1}])
def test_numeric_needs_a_number_to_compare_with(answer: Any) -> None:
    with pytest.raises(ScoreError, match="the expected answer must be a number"):
        scored("42", answer, kind="numeric")


@pytest.mark.parametrize(
    ("output", "options", "expected"),
    [
        ("x = 12", {"pattern": r"\b12\b"}, 1),
        ("x = 123", {"pattern": r"\b12\b"}, 0),
        ("YES", {"pattern": "yes"}, 0),
        ("YES", {"pattern": "yes", "ignoreCase": True}, 1),
        ("  yes \n", {"pattern": "^yes$"}, 1),
        ("  yes ", {"pattern": "^yes$", "stripWhitespace": False}, 0),
        ("a\nb", {"pattern": "(?m)^b$"}, 1),
    ],
)
def test_regex(output: str, options: dict[str, Any], expected: float) -> None:
    assert scored(output, "unused", kind="regex", **options) == expected


def test_regex_of_the_task_row() -> None:
    assert scored("42!", r"^42\W?$", kind="regex", patternField="answer") == 1


def test_a_bad_regex_is_named() -> None:
    with pytest.raises(ScoreError, match=r"regular expression '\(': missing"):
        scored("x", "", kind="regex", pattern="(")


def test_an_output_cannot_stall_a_regex() -> None:
    begun = time.monotonic()
    with pytest.raises(ScoreError, match="took longer than 1 s"):
        scored("a" * 60000 + "!", "", kind="regex", pattern=r"^(a|aa)+$")
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("output", "answer", "path", "expected"),
    [
        ('{"answer": 42}', 42, "answer", 1),
        ('{"answer": 42.0}', 42, "answer", 1),
        ('{"answer": true}', 1, "answer", 0),
        ('{"answer": 1}', True, "answer", 0),
        ('{"answer": " x "}', "x", "answer", 1),
        ('{"result": {"items": [{"n": 1}, {"n": 2}]}}', 2, "result.items.1.n", 1),
        ('{"answer": {"a": [1, 2]}}', {"a": [1.0, 2]}, "answer", 1),
        ('{"answer": {"a": [1, 2]}}', {"a": [1, 2, 3]}, "answer", 0),
        ('thinking…\n{"answer": 42}\n\n', 42, "answer", 1),
        ('{"answer": null}', None, "answer", 1),
        ("not json", 42, "answer", 0),
        ("", 42, "answer", 0),
        ("[1]", 1, "answer", 0),
        ("[1]", 1, "5", 0),
        ('"answer"', 1, "answer", 0),
        ("[" * 100000, 1, "answer", 0),
    ],
)
def test_json_field(output: str, answer: Any, path: str, expected: float) -> None:
    assert scored(output, answer, kind="jsonField", path=path) == expected


@pytest.mark.parametrize(
    ("output", "answer", "expected"),
    [
        # By hand: common 2 of 3 said and 4 right → p 2/3, r 1/2, F1 4/7.
        ("red green blue", "green blue yellow black", 4 / 7),
        ("The Eiffel Tower", "eiffel tower!", 1),
        ("a cat, a cat", "cat", 2 / 3),
        ("dog", "cat", 0),
        ("", "", 1),
        ("the", "an", 1),
        ("", "cat", 0),
        ("cat", ["dog", "the cat"], 1),
    ],
)
def test_word_f1(output: str, answer: Any, expected: float) -> None:
    assert scored(output, answer, kind="wordF1", ignoreCase=True) == pytest.approx(expected)


def test_word_f1_minds_case_unless_told_otherwise() -> None:
    assert scored("Paris", "paris", kind="wordF1") == 0


KINDS: list[dict[str, Any]] = [
    {"kind": "exactMatch"},
    {"kind": "numeric", "tolerance": 0.5},
    {"kind": "regex", "pattern": r"\d+"},
    {"kind": "jsonField", "path": "a.0"},
    {"kind": "wordF1"},
]


@given(output=st.text(), scorer=st.sampled_from(KINDS))
def test_any_output_scores_between_0_and_1(output: str, scorer: dict[str, Any]) -> None:
    assert 0 <= scored(output, "12", **scorer) <= 1


@pytest.mark.parametrize("scorer", KINDS)
@pytest.mark.parametrize("output", ["1,234" * 200_000, "a " * 500_000, "{" * 1_000_000, "\0" * 1_000_000])
def test_a_megabyte_takes_no_time(output: str, scorer: dict[str, Any]) -> None:
    begun = time.process_time()
    scored(output, "12", **scorer)
    assert time.process_time() - begun < 3


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ({"kind": "exactMatch", "expectedField": "nope"}, "no field 'nope', which spec.reward.builtin.expectedField"),
        ({"kind": "regex", "patternField": "nope"}, "no field 'nope', which spec.reward.builtin.patternField"),
    ],
)
def test_a_field_that_the_task_lacks_is_named(scorer: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        builtin_score(BuiltinScorer.model_validate(scorer), "x", {"answer": 1})
