"""The watch over the processes of a run."""

import threading

import pytest

from kitestring_trainer.verl_backend import watch


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL_SECONDS", 0.001)


def test_a_death_is_told_once(quick):
    told, looks = [], iter([[], [], ["Ray's raylet"]])
    heard = threading.Event()
    watching = watch.ClusterWatch(lambda what: (told.append(what), heard.set()), lambda: next(looks))
    watching.start()
    assert heard.wait(10)
    watching._thread.join(10)
    assert told == ["Ray's raylet"]


def test_not_being_able_to_look_is_a_death(quick):
    def look():
        raise ConnectionError("GCS is gone")

    told, heard = [], threading.Event()
    watch.ClusterWatch(lambda what: (told.append(what), heard.set()), look).start()
    assert heard.wait(10), "a watch that ended silently would let the run wait for ever"
    assert told == ["Ray, which does not say what lives (ConnectionError: GCS is gone)"]


def test_nothing_is_told_after_the_end(quick):
    looked, go, told = threading.Event(), threading.Event(), []

    def look():
        looked.set()
        go.wait(10)
        raise ConnectionError("shut down")

    watching = watch.ClusterWatch(told.append, look)
    watching.start()
    assert looked.wait(10)
    watching.close()
    go.set()
    watching._thread.join(10)
    assert told == []
