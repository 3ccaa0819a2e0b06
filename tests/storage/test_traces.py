"""Traces are tailed alike in every store."""

from __future__ import annotations

from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.object_keys import new_key
from kitestring_rollout.traces.reader import TraceReader, read_attempts
from kitestring_rollout.traces.requests import export_request
from tests.traces.rollouts import call, encoded, identity


def test_attempts_are_found_as_their_objects_come_in(store: ObjectStore) -> None:
    reader = TraceReader(store)
    assert list(reader.poll()) == []
    for number in range(1, 6):
        of = identity(number)
        first, *others = (span.data for span in encoded([call(seq, identity=of) for seq in (1, 2)], of))
        store.put(new_key("traces/"), export_request([first], {}))
        store.put(new_key("agent/"), b"not for the trainer")
        assert list(reader.poll()) == []
        store.put(new_key("traces/"), export_request(others, {}))
        (proven,) = reader.poll()
        assert isinstance(proven, ProvenAttempt)
        assert proven.attempt == of.attempt
    assert reader.counts.objects == 10
    assert {one.attempt for one in read_attempts(store)} == {identity(number).attempt for number in range(1, 6)}
