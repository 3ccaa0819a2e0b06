"""`kitestring export` has every token that the policy server produced for an agent, bit for bit, once; the agents saw
none of it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.local_run import audit
from tests.thread.produced import Produced, begins, exported, produced
from tests.thread.recorder import Exchange
from tests.thread.stack import GROUP_SIZE, SCENES, Thread

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

HIDDEN = {"prompt_token_ids", "token_ids", "logprobs", "prompt_logprobs", "weight_versions", "usage"}
"""What the gateway asks a policy server for; `usage` in streams only."""
ENDED_EARLY = "call "


def exchanges(thread: Thread) -> dict[str, Exchange]:
    """Every request to the policy server by its label; no label was sent twice."""
    found = {exchange.label: exchange for exchange in thread.recorder.exchanges}
    assert len(found) == len(thread.recorder.exchanges)
    return found


def calls(thread: Thread, *, delivered: bool = True) -> list[tuple[str, Exchange]]:
    """(attempt, exchange) of each reply of the policy that its agent got, or did not get whole."""
    by_label = exchanges(thread)
    return [
        (seen["attempt"], by_label[call["label"]])
        for seen in thread.evidence
        for call in seen["calls"]
        if call["model"] in ("policy", "gpt-4o-mini") and not call["replay"] and call["delivered"] is delivered
    ]


def by_attempt(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row["attempt"]].append(row)
    return found


def delivered_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not (row["excluded"] or "").startswith(ENDED_EARLY)]


def expected(thread: Thread) -> dict[str, list[Produced]]:
    found = defaultdict(list)
    for attempt, exchange in calls(thread):
        assert exchange.status == 200 and not exchange.abandoned
        found[attempt] += produced(exchange)
    return found


def test_the_run_is_whole(thread: Thread) -> None:
    assert (thread.result["phase"], thread.result["excluded"]) == ("Succeeded", 0), thread.result
    assert audit(thread.run.store(), 1) == {"Succeeded": len(SCENES) * GROUP_SIZE}
    assert Counter(seen["scene"] for seen in thread.evidence) == dict.fromkeys(SCENES, GROUP_SIZE)
    thread.run.assert_no_process_left()
    assert "Traceback" not in thread.run.logs()


def test_every_choice_of_every_reply_is_exported_once_and_bit_for_bit(thread: Thread) -> None:
    rows = by_attempt(delivered_rows(thread.rows))
    wanted = expected(thread)
    assert rows.keys() == wanted.keys() and len(rows) == len(SCENES) * GROUP_SIZE
    for attempt, choices in wanted.items():
        assert Counter(map(exported, rows[attempt])) == Counter(choices)
    for row in delivered_rows(thread.rows):
        assert row["excluded"] is None and row["loss_weight"] > 0 and row["row"] is not None, row
        assert (row["policy"], row["reward"]) == ("policy", 1.0)


def test_what_was_exchanged_is_worth_the_comparison(thread: Thread) -> None:
    """All kinds of calls took place, and their replies were not empty."""
    found = [exchange for _, exchange in calls(thread)]
    kinds = Counter((e.path, bool(e.request.get("stream")), e.request.get("n", 1) > 1) for e in found)
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert kinds[path, False, True] and kinds[path, True, True] and kinds[path, False, False]
    whole = [choice for exchange in found for choice in produced(exchange)]
    assert all(
        choice.prompt and choice.response and len(choice.logprobs) == 4 * len(choice.response) for choice in whole
    )
    assert {choice.finish_reason for choice in whole} >= {"stop", "length", "tool_calls"}
    assert sum(len(choice.response) for choice in whole) > 400
    streamed = [e for e in found if e.request.get("stream") and e.request.get("tools")]
    assert any(choice.finish_reason == "tool_calls" for exchange in streamed for choice in produced(exchange))


def test_calls_are_numbered_in_the_order_in_which_their_agent_made_them(thread: Thread) -> None:
    rows = by_attempt(delivered_rows(thread.rows))
    together = {seen["attempt"] for seen in thread.of("together")}
    for attempt, choices in expected(thread).items():
        seqs = [row["seq"] for row in rows[attempt]]
        assert seqs == sorted(seqs)
        if attempt not in together:
            assert [exported(row) for row in rows[attempt]] == choices


def test_tokens_know_the_version_that_sampled_them_across_a_push(thread: Thread) -> None:
    spans = [exported(row).versions for row in thread.rows if not row["excluded"]]
    assert all(versions and versions[0][1] == 0 for versions in spans)
    changed = [versions for versions in spans if len(versions) > 1]
    assert changed, "no weights were pushed in the middle of a reply"
    for versions in changed:
        assert all(before[2] == after[1] for before, after in pairwise(versions))
        assert len({version for version, _, _ in versions}) == len(versions)
    pushed = {version for versions in spans for version, _, _ in versions}
    assert "default" in pushed and pushed > {version for version, _, _ in changed[0][:1]}


def test_what_did_not_arrive_is_excluded_with_its_reason(thread: Thread) -> None:
    early = [row for row in thread.rows if (row["excluded"] or "").startswith(ENDED_EARLY)]
    leavers = {seen["attempt"] for seen in thread.of("leaves")}
    assert {row["attempt"] for row in early} == leavers
    assert Counter(row["excluded"] for row in early) == {
        "call cancelled": GROUP_SIZE,
        "call undelivered": 12 * GROUP_SIZE,
    }
    assert all(row["loss_weight"] == 0 and row["row"] is None for row in early)
    held = {a: e for a, e in calls(thread, delivered=False) if e.request.get("stream")}
    unread = {a: e for a, e in calls(thread, delivered=False) if not e.request.get("stream")}
    rows = by_attempt(early)
    for attempt in leavers:
        assert held[attempt].abandoned, "the generation went on for nobody"
        cancelled, *undelivered = map(exported, rows[attempt])
        assert cancelled.response and begins(cancelled, produced(held[attempt])[0])
        assert undelivered == produced(unread[attempt])


def test_a_repeated_request_is_one_call(thread: Thread) -> None:
    for seen in thread.of("repeats"):
        answers = defaultdict(set)
        for call in seen["calls"]:
            answers[call["label"]].add(json.dumps(call["received"]))
        assert len(answers) == 5 and all(len(answer) == 1 for answer in answers.values())
        rows = [row for row in thread.rows if row["attempt"] == seen["attempt"]]
        assert [(row["seq"], row["choice"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0)]
    assert thread.metrics["kitestring_gateway_replayed_total",] == 3 * GROUP_SIZE


def test_parquet_holds_the_same_rows(thread: Thread, tmp_path: Path) -> None:
    from pyarrow import parquet

    thread.export("--to", str(tmp_path / "rows.parquet"))
    table = parquet.read_table(tmp_path / "rows.parquet")
    found = table.to_pylist()
    assert [exported(row) for row in found] == [exported(row) for row in thread.rows]
    plain = [{name: value for name, value in row.items() if name != "response_logprobs"} for row in thread.rows]
    assert [{name: value for name, value in row.items() if name != "response_logprobs"} for row in found] == plain
    logprobs = table.column("response_logprobs").combine_chunks().flatten().to_numpy()
    assert logprobs.dtype == np.float32


def test_agents_see_neither_ids_nor_logprobs_unless_they_asked(thread: Thread) -> None:
    checked = 0
    for seen in thread.evidence:
        for call in seen["calls"]:
            hidden = HIDDEN.difference(call["asked"], () if len(call["received"]) > 1 else ("usage",))
            for text in call["received"]:
                assert not fields(json.loads(text)) & hidden, text
                checked += 1
            for name in call["asked"]:
                assert any(name in fields(json.loads(text)) for text in call["received"]), name
    assert checked > 200


def test_hidden_fields_and_credentials_reach_no_agent(thread: Thread) -> None:
    secrets = {path.name: path.read_text() for path in thread.folder.secrets.iterdir()}
    assert {"queue", "gateway-admin", "collector", "collector-agent", "token-key", "model-judge"} <= secrets.keys()
    for seen in thread.evidence:
        text = json.dumps(seen)
        assert "canary-" not in text and "expected" not in seen["task"]
        assert [name for name, value in secrets.items() if value in text] == []


def fields(value: Any) -> set[str]:
    """Names of all fields that hold something, at any depth."""
    if isinstance(value, list):
        return set().union(*map(fields, value))
    if not isinstance(value, dict):
        return set()
    held = {name: inner for name, inner in value.items() if inner is not None}
    return set(held).union(*map(fields, held.values()))
