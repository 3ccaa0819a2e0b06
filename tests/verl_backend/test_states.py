"""Resumable states: a run that is stopped or fails loses no finished update."""

import pytest

from kitestring_trainer.errors import ReplacedError, RunFailedError, RunStoppedError
from kitestring_trainer.verl_backend.feed import StopRequestedError
from kitestring_trainer.verl_backend.states import saved_at_the_end


@pytest.mark.parametrize(
    "error", [StopRequestedError(), RunStoppedError("stopped on request"), RunFailedError("StorageUnavailable", "away")]
)
def test_what_ends_the_run_has_its_state_saved(error):
    saved = []
    with pytest.raises(type(error)), saved_at_the_end(lambda: saved.append(1)):
        raise error
    assert saved == [1]


def test_neither_a_bug_nor_a_trainer_that_was_replaced_nor_going_on_saves_a_state():
    saved = []
    for error in (ZeroDivisionError(), ReplacedError("incarnation 2 has begun")):
        with pytest.raises(type(error)), saved_at_the_end(lambda: saved.append(1)):
            raise error
    with saved_at_the_end(lambda: saved.append(1)):
        pass
    assert saved == []
