from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api import names
from kitestring_api.v1alpha1.reward import Reward
from kitestring_rollout.protocol.gateway_admin import PostedReward
from kitestring_rollout.scoring import Score, ScoringInput, resolve_reward, score, score_attempt
from kitestring_rollout.scoring.command import read_reward
from kitestring_rollout.scoring.value import ScoreError, reward_value


def attempt(**fields: Any) -> ScoringInput:
    values = {"visible": {"question": "6*7"}, "hidden": {"answer": "42"}, "output": "42", "exit_code": 0, **fields}
    return ScoringInput(**values)


def posted(**values: float) -> tuple[PostedReward, ...]:
    return tuple(PostedReward(value=value, name=name, received_unix_nano=1) for name, value in values.items())


def by_command(script: str, seconds: int = 20, **rules: Any) -> Reward:
    command = {"command": [sys.executable, "-c", script], "timeoutSeconds": seconds}
    return Reward.model_validate({"source": "command", "command": command, **rules})


BUILTIN = Reward.model_validate({"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}})
AGENT = Reward.model_validate({"source": "agent"})
EXIT_CODE = Reward.model_validate({"source": "exitCode"})


async def test_builtin_reads_the_hidden_field_before_a_visible_one() -> None:
    assert await score(BUILTIN, attempt(visible={"answer": "1"})) == Score(1.0)
    assert await score(BUILTIN, attempt(output="41")) == Score(0.0)


async def test_no_output_is_a_missing_reward_not_a_zero() -> None:
    scored = await score(BUILTIN, attempt(output=None))
    assert (scored.reward, scored.problem) == (None, "missing")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (posted(reward=0.5), 0.5),
        (posted(reward=0.5, style=1), 0.5),
        (posted(style=1), 1.0),
        (posted(style=1, speed=2), None),
        ((), None),
    ],
)
async def test_reward_of_the_agent(rewards: tuple[PostedReward, ...], expected: float | None) -> None:
    scored = await score(AGENT, attempt(rewards=rewards))
    assert scored.reward == expected
    assert (scored.problem == "missing") == (expected is None)


async def test_exit_code() -> None:
    assert (await score(EXIT_CODE, attempt())).reward == 1
    assert (await score(EXIT_CODE, attempt(exit_code=3))).reward == 0
    given_values = Reward.model_validate({"source": "exitCode", "exitCode": {"success": 5, "failure": -1.5}})
    assert (await score(given_values, attempt(exit_code=None))).reward == -1.5


async def test_a_command_sees_the_hidden_part_and_its_last_line_counts() -> None:
    reward = by_command(
        "import json, sys\n"
        "asked = json.load(sys.stdin)\n"
        "print('0.25 so far')\n"
        "print(1.0 if asked['hidden']['answer'] == asked['output'] and asked['exitCode'] == 0 else 0)\n"
        "print()"
    )
    assert await score(reward, attempt()) == Score(1.0)


async def test_a_command_gets_no_environment_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    reward = by_command("import os; print(float('hush' in str(os.environ) or len(os.environ) > 6))")
    assert await score(reward, attempt()) == Score(0.0)
    reward = by_command("import os; print(float(os.getcwd() == '" + str(tmp_path) + "'))")
    assert await score(reward, attempt(), working_dir=tmp_path) == Score(1.0)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('great')", "last line is no number: 'great'"),
        ("print('NaN')", "must be finite, found nan"),
        ("print('-inf')", "must be finite, found inf"),
        ("print('true')", "a boolean"),
        ("print('\"1\"')", "must be a number, found '1'"),
        ("print('{\"score\": 1}')", "has no field reward"),
        ("print('{\"reward\": NaN}')", "must be finite"),
        ("print('1e999')", "must be finite"),
        ("print('null')", "must be a number, found None"),
        ("pass", "printed nothing"),
        ("import sys; print('no such file', file=sys.stderr); sys.exit(3)", "exit code 3: no such file"),
        ("import os; os.abort()", "signal SIGABRT"),
        ("print('x' * 10_000_000)", "no number"),
    ],
)
async def test_what_a_command_says_wrongly_is_refused_by_name(script: str, reason: str) -> None:
    scored = await score(by_command(script), attempt())
    assert scored.reward is None
    assert scored.reason is not None
    assert re.search(reason, scored.reason), scored.reason


async def test_a_command_that_does_not_exist_is_named() -> None:
    reward = Reward.model_validate({"source": "command", "command": {"command": ["/no/such/scorer"]}})
    scored = await score(reward, attempt())
    assert scored == Score(None, "the scorer '/no/such/scorer' cannot be started: No such file or directory", "refused")


async def test_a_slow_command_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    scored = await score(by_command(script, seconds=1), attempt())
    assert scored.reward is None
    assert scored.reason is not None
    assert "took longer than 1 s" in scored.reason
    assert _ends(int((tmp_path / "pid").read_text()))


async def test_a_command_that_leaves_something_in_the_background_counts(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = (
        f"import subprocess; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); print(0.5)"
    )
    assert await score(by_command(script), attempt()) == Score(0.5)
    assert _ends(int(pid.read_text()))


async def test_a_command_that_does_not_read_a_large_question_counts() -> None:
    assert await score(by_command("print(0.5)"), attempt(output="x" * 5_000_000)) == Score(0.5)


def _ends(pid: int) -> bool:
    """A process that was killed is gone a moment later, and nobody says when."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("line", "value"),
    [("1", 1), (" .5 ".strip(), 0.5), ("+2.", 2), ("-1e-3", -0.001), ('{"reward": 0.5, "note": "ok"}', 0.5)],
)
def test_numbers_that_a_command_may_print(line: str, value: float) -> None:
    assert read_reward(line) == value


@given(st.text())
def test_any_line_is_a_value_or_an_error_with_a_reason(line: str) -> None:
    try:
        reward_value(read_reward(line), AGENT)
    except ScoreError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1", None, [1], True])
def test_what_is_no_reward(value: Any) -> None:
    with pytest.raises(ScoreError):
        reward_value(value, AGENT)


def test_bounds_and_booleans() -> None:
    bounded = Reward.model_validate({"source": "agent", "min": -1, "max": 1, "booleans": "asNumber"})
    assert reward_value(True, bounded) == 1.0
    assert reward_value(-1, bounded) == -1.0
    with pytest.raises(ScoreError, match=r"2 is above spec.reward.max 1"):
        reward_value(2, bounded)
    with pytest.raises(ScoreError, match=r"-1.5 is below spec.reward.min -1"):
        reward_value(-1.5, bounded)


MISSING = Score(None, "nobody said", "missing")
REFUSED = Score(None, "NaN", "refused")
OK, FAILED, LATE = names.CLASS_SUCCEEDED, names.CLASS_AGENT_FAILED, names.CLASS_TIMED_OUT


@pytest.mark.parametrize(
    ("rules", "outcome", "scored", "expected"),
    [
        ({}, OK, Score(0.7), 0.7),
        ({}, OK, MISSING, None),
        ({}, OK, REFUSED, None),
        ({"missing": "zero"}, OK, MISSING, 0.0),
        ({"missing": "zero"}, OK, REFUSED, 0.0),
        ({}, FAILED, Score(0.7), None),
        ({"onAgentFailure": "zero"}, FAILED, Score(0.7), 0.0),
        ({"onAgentFailure": "score"}, FAILED, Score(0.7), 0.7),
        ({"onAgentFailure": "score"}, FAILED, MISSING, None),
        ({"onAgentFailure": "score", "missing": "zero"}, FAILED, MISSING, 0.0),
        ({}, LATE, Score(0.7), None),
        ({"onTimeout": "zero"}, LATE, MISSING, 0.0),
        ({"onTimeout": "score"}, LATE, Score(0.7), 0.7),
        ({"onTimeout": "zero"}, FAILED, Score(0.7), None),
        ({"missing": "zero", "onTimeout": "zero"}, names.CLASS_INFRASTRUCTURE, Score(0.7), None),
        ({"missing": "zero"}, names.CLASS_INVALID_TASK, MISSING, None),
    ],
)
def test_resolution(rules: dict[str, Any], outcome: str, scored: Score, expected: float | None) -> None:
    reward = Reward.model_validate({"source": "agent", **rules})
    resolved = resolve_reward(reward, outcome, scored, exit_code=1)
    assert resolved.reward == expected
    if scored.reason and expected is None and outcome == OK:
        assert resolved.reason == scored.reason


async def test_an_exit_code_that_scores_is_an_answer_but_a_signal_is_a_failure() -> None:
    assert (await score_attempt(EXIT_CODE, FAILED, attempt(exit_code=1))).reward == 0.0
    assert (await score_attempt(EXIT_CODE, FAILED, attempt(exit_code=None))).reward is None


async def test_a_scorer_whose_word_would_not_count_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    reward = by_command(f"open({str(ran)!r}, 'w'); print(1)")
    assert (await score_attempt(reward, FAILED, attempt(exit_code=1))).reward is None
    assert (await score_attempt(reward, names.CLASS_INFRASTRUCTURE, attempt())).reward is None
    assert not ran.exists()
    assert (await score_attempt(reward, OK, attempt())).reward == 1
    assert ran.exists()


async def test_the_question_of_a_command(tmp_path: Path) -> None:
    file = tmp_path / "asked.json"
    reward = by_command(f"import sys; open({str(file)!r}, 'w').write(sys.stdin.read()); print(0)")
    await score(reward, attempt(calls=2, messages=[{"role": "user", "content": "é"}]))
    assert json.loads(file.read_text()) == {
        "task": {"question": "6*7"},
        "hidden": {"answer": "42"},
        "output": "42",
        "exitCode": 0,
        "calls": 2,
        "messages": [{"role": "user", "content": "é"}],
    }
