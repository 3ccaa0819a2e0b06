from __future__ import annotations

from pathlib import Path

import pytest

from kitestring_api.v1alpha1.agent_protocol import TaskDelivery
from kitestring_trainer.errors import UserMistakeError
from kitestring_trainer.tasks import Task, TaskFields, TaskSet, load_tasks, split

FIELDS = TaskFields(
    hidden=frozenset({"answer"}),
    required=(("question", "spec.agentProtocol.task.field"), ("answer", "spec.reward.builtin.expectedField")),
)


def load(path: Path, fields: TaskFields = FIELDS, limit: int | None = None) -> TaskSet:
    return load_tasks(path, fields, format=None, limit=limit)


def test_a_row_is_split_into_what_the_agent_sees_and_what_it_does_not(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "2+3", "answer": "5", "level": 1}\n\n{"question": "1+1", "answer": "2"}\n')
    tasks = load(path)
    assert len(tasks) == 2
    assert tasks.task(0) == Task(visible={"question": "2+3", "level": 1}, hidden={"answer": "5"})
    assert tasks.report() is None


def test_visible_fields_leave_out_all_others(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "2+3", "answer": "5", "secret": 1}\n')
    fields = TaskFields(hidden=frozenset({"answer"}), visible=("question",))
    assert load(path, fields).task(0) == Task(visible={"question": "2+3"}, hidden={"answer": "5"})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1, 2]", "is an array; allowed: a JSON object"),
        ("null", "is null; allowed: a JSON object"),
        ('"text"', "is a string; allowed: a JSON object"),
        ('{"question": "a", "answer": NaN}', "line 2 is not JSON"),
        ('{"question": "a", "answer": "b"', "line 2 is not JSON"),
        ('{"answer": "b"}', "has no field 'question', which spec.agentProtocol.task.field names"),
        (
            '{"question": "a"}',
            "has no field 'answer', which spec.reward.builtin.expectedField names; its fields: question",
        ),
    ],
)
def test_a_bad_row_spoils_itself_alone(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "tasks.jsonl"
    good = '{"question": "2+3", "answer": "5"}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    tasks = load(path)
    assert [isinstance(row, Task) for row in tasks.rows] == [True, False, True]
    assert tasks.invalid == (1,)
    assert problem in (tasks.problem(1) or "")
    assert "1 of 3 rows cannot be used (row 1: " in (tasks.report() or "")
    with pytest.raises(KeyError):
        tasks.task(1)


def test_hostile_text_in_a_row_is_only_data(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "a\\"\\n  command: [sh, -c, $(id)]\\n", "answer": "5"}\n')
    assert load(path).task(0).visible == {"question": 'a"\n  command: [sh, -c, $(id)]\n'}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tasks.jsonl", "\n\n", "no task in it"),
        ("tasks.jsonl", '{"x": 1}\n{"x": 2}\n', "none of its 2 rows can be used; row 0: has no field 'question'"),
        ("tasks.csv", "a,b\n", "suffix '.csv' says no format; allowed: .jsonl, .parquet"),
        ("tasks.parquet", "not parquet", "not a Parquet file"),
    ],
)
def test_a_file_without_usable_rows_is_the_users_to_mend(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserMistakeError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_a_task_that_no_agent_can_be_started_with_is_invalid(source: str) -> None:
    name = len("KITESTRING_TASK=") if source == "environment" else 0
    fits = 128 * 1024 - 1 - name
    fields = TaskFields(delivery=TaskDelivery.model_validate({"from": source, "format": "text", "field": "question"}))
    rows = [{"question": text} for text in ("x" * fits, "x" * (fits + 1), "é" * (fits // 2 + 1), "a\0b", "ok")]
    problems = [problem if isinstance(problem, str) else None for problem in (split(row, fields) for row in rows)]
    assert problems[0] is None and problems[4] is None
    for problem in problems[1:3]:
        assert problem is not None and f"bytes) for the {source}, which holds 131071; use agentProtocol" in problem
    assert problems[3] == f"has a NUL, which no {source} can hold; use agentProtocol.task.from: file or stdin"
    for free in ("stdin", "file"):
        delivery = TaskDelivery.model_validate({"from": free, "format": "text", "field": "question"})
        assert all(isinstance(split(row, TaskFields(delivery=delivery)), Task) for row in rows)


def test_a_long_task_as_json_is_measured_as_the_agent_gets_it() -> None:
    fields = TaskFields(hidden=frozenset({"answer"}), delivery=TaskDelivery.model_validate({"from": "argument"}))
    assert isinstance(split({"question": "x" * 131_000, "answer": "y" * 1000}, fields), Task)
    assert "too long" in str(split({"question": '"' * 66_000, "answer": ""}, fields))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserMistakeError, match=r"no such file.*in the trainer's image.*configMap"):
        load(tmp_path / "none.jsonl")


def test_the_limit_counts_rows(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"question": "{i}", "answer": "{i}"}}\n' for i in range(9)))
    assert len(load(path, limit=4)) == 4


def test_parquet_rows_are_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "tasks.parquet"
    rows = [{"question": "2+3", "answer": "5"}, {"question": "1+1", "answer": "2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tasks = load(path)
    assert tasks.task(1) == Task(visible={"question": "1+1"}, hidden={"answer": "2"})


def test_parquet_bytes_cannot_reach_an_agent(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "tasks.parquet"
    rows = [{"question": "a", "answer": "b", "image": b"\x00"}, {"question": "a", "answer": "b", "image": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tasks = load(path)
    assert tasks.invalid == (0,)
    assert "cannot be written as JSON" in (tasks.problem(0) or "")


def test_inline_rows() -> None:
    rows = [{"question": "2+3", "answer": "5"}]
    assert load_tasks(rows, FIELDS, format=None, limit=None).task(0).hidden == {"answer": "5"}
