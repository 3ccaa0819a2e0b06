"""When a scorer counts as away, from what those who ask it tell."""

from __future__ import annotations

from kitestring_rollout.scoring.outage import Outage


def test_it_begins_with_the_first_who_had_no_answer_and_counts_after_the_time() -> None:
    outage = Outage(60)
    assert outage.lasts(1e9) is None, "nobody asked"
    outage.unanswered(100, "refused")
    outage.unanswered(130, "broken")
    assert outage.lasts(159) is None
    assert (outage.lasts(160), outage.problem) == (60, "broken")


def test_an_answer_ends_it() -> None:
    outage = Outage(60)
    outage.unanswered(100, "refused")
    outage.answered(170)
    assert outage.lasts(1000) is None
    outage.unanswered(165, "slow")
    assert outage.lasts(229) is None, "others had answers since this one asked"
    assert outage.lasts(230) == 60


def test_who_was_there_before_somebody_began_who_waited_in_vain_need_not_ask() -> None:
    outage = Outage(60)
    outage.waited_out(0)
    outage.unanswered(0, "no answer")
    assert not outage.was_waited_out(0, 60), "who waited began no later"
    outage.waited_out(60)
    outage.waited_out(30)
    assert outage.was_waited_out(0, 120)
    assert not outage.was_waited_out(61, 120), "who came later asks"
    outage.answered(121)
    assert not outage.was_waited_out(0, 200)
    outage.waited_out(60)
    outage.unanswered(121, "no answer")
    assert not outage.was_waited_out(0, 200), "an answer came since that one began"
