"""The built-in scorers: output of the agent and expected answer → number. Pure.

Agents are optimised against these functions: each takes any text, of the length that the pool lets through, in time
linear in it; an expression of the user's gets a bounded time.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation, Overflow
from typing import Any

import regex

from kitestring_api.v1alpha1.reward import BuiltinScorer
from kitestring_rollout.scoring.value import ScoreError, shown

REGEX_SECONDS = 1.0
NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,4}(?!\w))?")
MAX_DIGITS = 400
_ARTICLES = frozenset(("a", "an", "the"))
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def builtin_score(scorer: BuiltinScorer, output: str, row: Mapping[str, Any]) -> float:
    """The score of `output` against the fields of the task row; ScoreError when the row or the scorer is unusable."""
    if scorer.kind == "regex":
        pattern = scorer.pattern if scorer.pattern is not None else _field(row, scorer.pattern_field, "patternField")
        if not isinstance(pattern, str):
            raise ScoreError(f"field {scorer.pattern_field!r} of the task must be a text, found {shown(pattern)}")
        return regex_match(_stripped(output, scorer), pattern, ignore_case=scorer.ignore_case)
    expected = _field(row, scorer.expected_field, "expectedField")
    if scorer.kind == "numeric":
        return numeric(output, expected, scorer.tolerance or 0.0)
    if scorer.kind == "jsonField":
        return json_field(output, scorer.path or "", expected, strip=scorer.strip_whitespace)
    one = exact_match if scorer.kind == "exactMatch" else word_f1
    answers = expected if isinstance(expected, list) else [expected]
    if not answers:
        raise ScoreError(f"field {scorer.expected_field!r} of the task is an empty list of answers")
    return max(
        one(_stripped(output, scorer), _stripped(_text(answer), scorer), ignore_case=scorer.ignore_case)
        for answer in answers
    )


def exact_match(output: str, expected: str, *, ignore_case: bool) -> float:
    """1 if both texts are the same, else 0."""
    if ignore_case:
        output, expected = output.casefold(), expected.casefold()
    return float(output == expected)


def numeric(output: str, expected: Any, tolerance: float) -> float:
    """1 if the last number in `output` differs from `expected` by at most `tolerance`, else 0; 0 without any number.

    A number may have a sign, groups of thousands (1,234), a fraction and an exponent. Compared as decimals, exactly.
    """
    right = _last_number(expected) if isinstance(expected, str) else _decimal(expected)
    if right is None:
        raise ScoreError(f"the expected answer must be a number, found {shown(expected)}")
    found = _last_number(output)
    if found is None:
        return 0.0
    try:
        return float(found == right or abs(found - right) <= Decimal(repr(tolerance)))
    except (Overflow, InvalidOperation):
        return 0.0


def regex_match(output: str, pattern: str, *, ignore_case: bool) -> float:
    """1 if the expression is found anywhere in `output`, else 0; ScoreError for a bad expression or one too slow."""
    try:
        flags = regex.IGNORECASE if ignore_case else 0
        return float(regex.search(pattern, output, flags=flags, timeout=REGEX_SECONDS, concurrent=True) is not None)
    except regex.error as error:
        raise ScoreError(f"regular expression {shown(pattern)}: {error}") from None
    except TimeoutError:
        raise ScoreError(
            f"regular expression {shown(pattern)} took longer than {REGEX_SECONDS:g} s on this output; make it simpler"
        ) from None


def json_field(output: str, path: str, expected: Any, *, strip: bool) -> float:
    """1 if the value at the dotted `path` of the JSON in `output` equals `expected`, else 0.

    The whole output is read as JSON, or else its last line that is not blank. Numbers in `path` index lists. 1 equals
    1.0, true does not equal 1. What is no JSON, or has nothing at the path, scores 0.
    """
    try:
        value = _json(output)
        for step in path.split("."):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return 0.0
    try:
        return float(_same(value, expected, strip))
    except RecursionError:
        return 0.0


def word_f1(output: str, expected: str, *, ignore_case: bool) -> float:
    """F1 of the words of both texts as multisets, after SQuAD's normalisation: punctuation and articles are left out.

    precision p = common / words of output, recall r = common / words of expected, F1 = 2 p r / (p + r); without words
    on one side 1 if there are none on either, else 0. Source: Rajpurkar et al. 2016 (SQuAD), official evaluation script
    v2.0, which always ignores case: set ignoreCase for that.
    """
    said, right = _words(output, ignore_case), _words(expected, ignore_case)
    if not said or not right:
        return float(said == right)
    common = sum((Counter(said) & Counter(right)).values())
    # 2 p r / (p + r) with p = c / s and r = c / e is 2 c / (s + e).
    return 2 * common / (len(said) + len(right))


def _field(row: Mapping[str, Any], name: str | None, where: str) -> Any:
    if name is None or name not in row:
        raise ScoreError(f"the task has no field {name!r}, which spec.reward.builtin.{where} names")
    return row[name]


def _stripped(text: str, scorer: BuiltinScorer) -> str:
    return text.strip() if scorer.strip_whitespace else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _words(text: str, ignore_case: bool) -> list[str]:
    words = (text.lower() if ignore_case else text).translate(_NO_PUNCTUATION).split()
    return [word for word in words if word.lower() not in _ARTICLES]


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return _decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def _decimal(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)) > MAX_DIGITS:
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        return json.loads(lines[-1]) if lines else json.loads(text)


def _same(found: Any, expected: Any, strip: bool) -> bool:
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, str) and isinstance(expected, str):
        return found.strip() == expected.strip() if strip else found == expected
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(
            _same(one, other, strip) for one, other in zip(found, expected, strict=True)
        )
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[key], expected[key], strip) for key in found)
    return bool(found == expected)
