"""What a worker says to the queue."""

from __future__ import annotations

import pytest

from kitestring_rollout.protocol.queue import Finish
from kitestring_rollout.worker import queue_client
from kitestring_rollout.worker.queue_client import OUTPUT_BYTES, reportable

MAX_BYTES = 16_777_216
"""The largest output that a pool may ask for."""


def finish(output: str) -> Finish:
    return Finish(attempt="a", ended="exited", exit_code=0, output=output, log_tail="\0" * 65536, seconds=1.0)


def test_an_output_of_which_json_makes_too_much_is_cut() -> None:
    """The queue would refuse it, and hear nothing of how the agent ended."""
    said = reportable(finish("\0" * MAX_BYTES))
    assert said.output_truncated
    assert len(said.output) == 10 << 20
    assert len(said.model_dump_json()) < 64 << 20


@pytest.mark.parametrize("output", ["", "x" * MAX_BYTES, "\ufffd" * MAX_BYTES, "\0" * (OUTPUT_BYTES // 6)])
def test_any_other_is_reported_as_it_is(output: str) -> None:
    assert reportable(finish(output)) == finish(output)


def test_characters_of_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_client, "OUTPUT_BYTES", 72)
    assert reportable(finish("\U0001f9ea" * 14)).output == "\U0001f9ea" * 14
    assert reportable(finish("\U0001f9ea" * 15)).output == "\U0001f9ea" * 12
