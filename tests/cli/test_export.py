"""kitestring export: every transition bit for bit, joined with what became of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_api.errors import UserMistakeError
from kitestring_cli.export.command import parse_steps
from kitestring_cli.export.rows import MESSAGE_COLUMNS, TRANSITION_COLUMNS
from kitestring_cli.inspection.attempts import plan_attempts
from kitestring_cli.inspection.records import RunRecords
from kitestring_rollout.storage import DirectoryStore
from kitestring_trainer.samples.batches import SampleRecord
from tests.cli.conftest import Command, Said
from tests.cli.run_folders import MadeUpRun, Try, half_right, make_run
from tests.cli.test_inspect import learn


def rows(said: Said) -> list[dict[str, Any]]:
    assert said.code == 0, said.err
    return [json.loads(line) for line in said.out.splitlines()]


def test_ids_and_logprobs_come_back_bit_for_bit(kitestring: Command, made: MadeUpRun, tmp_path: Path) -> None:
    learn(made)
    lines = rows(kitestring("export", "calc"))
    assert kitestring("export", "calc", "--to", "all.parquet").code == 0
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    assert table.column_names == list(TRANSITION_COLUMNS)
    for found in (lines, table.to_pylist()):
        assert len(found) == 18  # (4 + 1 failed attempt + 4) of two calls; the attempt without an end proves nothing
        for row in found:
            prompt, response, logprobs = made.ids[row["attempt"], row["seq"]]
            assert row["prompt_token_ids"] == prompt
            assert row["response_token_ids"] == response
            assert np.array(row["response_logprobs"], np.float32).tobytes() == np.array(logprobs, np.float32).tobytes()
            assert row["policy_versions"] == [{"version": "1.0", "start": 0, "end": len(response)}]
    assert lines == table.to_pylist()
    assert list(lines[0]) == list(TRANSITION_COLUMNS)


def test_what_became_of_each_transition(kitestring: Command, made: MadeUpRun) -> None:
    learn(made)
    found = {(row["attempt"], row["seq"]): row for row in rows(kitestring("export", "calc"))}
    samples: list[SampleRecord] = []
    for step in (1, 2):
        samples.extend(RunRecords(made.folder).samples(step).values())
    assert len(samples) == 14
    for sample in samples:
        row = found.pop((sample.attempt, sample.seq))
        for name in ("rollout", "choice", "credit", "advantage", "row", "loss_weight", "excluded"):
            assert row[name] == getattr(sample, name), name
        assert row["excluded"] is None
        assert row["reward"] == row["credit"]
        assert row["finish_reason"] == ("tool_calls" if row["seq"] == 1 else "stop")
    reasons = {row["excluded"] for row in found.values()}
    assert reasons == {
        "another attempt counts for this rollout; this one ended in AgentFailed",
        "no reward: no end within 60 s",
    }
    for row in found.values():
        assert (row["loss_weight"], row["row"], row["advantage"]) == (0.0, None, None)


def test_steps_and_modes(kitestring: Command, made: MadeUpRun) -> None:
    learn(made)
    assert {row["step"] for row in rows(kitestring("export", "calc", "--steps", "2-"))} == {2}
    sampled = rows(kitestring("export", "calc", "--mode", "validation-sampled"))
    assert {row["step"] for row in sampled} == {0, 2}
    assert {row["excluded"] for row in sampled} == {"mode validation-sampled is not trained on"}
    both = kitestring("export", "calc", "--mode", "validation-greedy", "--mode", "train", "--steps", "-1")
    assert [row["step"] for row in rows(both)] == [0] * 8 + [1] * 10
    said = kitestring("export", "calc", "--steps", "7")
    assert (said.code, said.out) == (2, "")
    assert said.err == "error: nothing to export: no such step of mode train; steps: 1, 2\n"


def test_a_step_that_was_not_committed(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1, commit=False)
    assert {row["excluded"] for row in rows(kitestring("export", "calc"))} == {"step 1 was not committed"}


def test_conversations(kitestring: Command, made: MadeUpRun, tmp_path: Path) -> None:
    made.step(1)
    found = rows(kitestring("export", "calc", "--what", "messages"))
    assert len(found) == 4
    assert list(found[0]) == list(MESSAGE_COLUMNS)
    for row in found:
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        assert row["messages"][-1] == {"role": "assistant", "content": "Answer: 4"}
        assert [tool["function"]["name"] for tool in row["tools"]] == ["calculator"]
        assert (row["reward"], row["excluded"]) in ((1.0, None), (0.0, None))
    assert kitestring("export", "calc", "--what", "messages", "--to", "chat.parquet").code == 0
    table = pyarrow.parquet.read_table(tmp_path / "chat.parquet").to_pylist()
    assert [
        {**row, "messages": json.loads(row["messages"]), "tools": json.loads(row["tools"])} for row in table
    ] == found


def test_conversations_that_were_not_recorded(kitestring: Command, tmp_path: Path) -> None:
    made = make_run(tmp_path / "runs", traces={"recordContents": False})
    made.record_contents = False
    made.step(1)
    said = kitestring("export", "calc", "--what", "messages")
    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines()[-1] == (
        "error: the run recorded no contents (spec.traces.recordContents: false); --what transitions has the token ids"
    )
    assert len(rows(kitestring("export", "calc"))) == 8


def test_a_file_appears_whole_or_not_at_all(
    kitestring: Command, made: MadeUpRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.step(1)
    made.step(2)
    good = (tmp_path / "all.jsonl", tmp_path / "all.parquet")
    for path in good:
        assert kitestring("export", "calc", "--to", path).code == 0
    before = [path.read_bytes() for path in good]
    read = RunRecords.samples

    def break_at_2(records: RunRecords, step: int) -> Any:
        if step == 2:
            raise UserMistakeError("the store went away")
        return read(records, step)

    monkeypatch.setattr(RunRecords, "samples", break_at_2)
    for path in good:
        assert kitestring("export", "calc", "--to", path).code == 2
    assert [path.read_bytes() for path in good] == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "all.parquet", "runs"]


@pytest.mark.parametrize(
    ("to", "error"),
    [
        ("all.csv", "--to all.csv: found suffix .csv; allowed: .jsonl, .parquet"),
        ("all", "--to all: found suffix none; allowed: .jsonl, .parquet"),
        ("nowhere/all.jsonl", "--to nowhere/all.jsonl: cannot be written: No such file or directory"),
        ("nowhere/all.parquet", "--to nowhere/all.parquet: cannot be written: No such file or directory"),
    ],
)
def test_files_that_cannot_be(kitestring: Command, made: MadeUpRun, to: str, error: str) -> None:
    made.step(1)
    said = kitestring("export", "calc", "--to", to)
    assert (said.code, said.out, said.err) == (2, "", f"error: {error}\n")


def test_a_run_without_traces(kitestring: Command, made: MadeUpRun) -> None:
    said = kitestring("export", "calc")
    assert said.code == 2
    assert "the run has no traces below traces/" in said.err


def test_a_trace_that_is_gone_is_said(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1)
    first = min((made.folder.store / "traces").rglob("*.binpb"))
    first.unlink()
    said = kitestring("export", "calc")
    assert len(rows(said)) == 4
    for rollout in ("t000001-00000000-000", "t000001-00000000-001"):
        assert f"note: {rollout}: the trace of attempt {made.attempts[rollout][0]}, which counts, is not in" in said.err


def test_only_the_stretch_of_a_step_is_read(made: MadeUpRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 5):
        made.step(step)
    fetched: list[str] = []
    get = DirectoryStore.get

    def counting(store: DirectoryStore, key: str) -> bytes:
        if key.startswith("traces/"):
            fetched.append(key)
        return get(store, key)

    monkeypatch.setattr(DirectoryStore, "get", counting)
    found = plan_attempts(RunRecords(made.folder), "train", 3, contents=False)
    assert len(found.proven) == 4
    assert len(fetched) == 2  # of 8 objects


def test_an_object_far_from_its_step_is_found_by_name(made: MadeUpRun) -> None:
    """The clock of a collector may differ from the trainer's: what is committed is looked for."""
    made.step(1)
    late = sorted((made.folder.store / "traces").rglob("*.binpb"))[-1]
    data = late.read_bytes()
    late.unlink()
    made.now += 30.0
    made.store.put(made._key(), data)
    assert len(plan_attempts(RunRecords(made.folder), "train", 1, contents=False).proven) == 4


def test_superseded_attempts(kitestring: Command, made: MadeUpRun) -> None:
    made.step(1, lambda _plan, index: [Try(), Try()] if index == 0 else half_right(_plan, index))
    key = "state/commits/t000001.json"
    commit = json.loads(made.store.get(key))
    old, _ = made.attempts["t000001-00000000-000"]
    made.store.put(key, json.dumps(commit | {"superseded": [old]}).encode())
    found = [row for row in rows(kitestring("export", "calc")) if row["attempt"] == old]
    assert {row["excluded"] for row in found} == {"superseded: sampled from weights that are no more"}


@given(first=st.integers(0, 10**6), length=st.integers(0, 10**6))
def test_ranges_of_steps(first: int, length: int) -> None:
    last = first + length
    assert parse_steps(f"{first}-{last}") == range(first, last + 1)
    assert parse_steps(str(first)) == range(first, first + 1)
    assert parse_steps(f"-{last}") == range(last + 1)
    assert last in parse_steps(f"{first}-")
    assert last in parse_steps("")
    if length:
        with pytest.raises(UserMistakeError, match="ends before it begins"):
            parse_steps(f"{last}-{first}")


@pytest.mark.parametrize("text", ["-", "a", "1-2-3", "1,2", "1.5"])
def test_no_ranges_of_steps(text: str) -> None:
    with pytest.raises(UserMistakeError, match="no range of steps"):
        parse_steps(text)
