"""Which policy versions are the same weights, against a simulation of every history of crashes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.incarnations import Incarnation, same_weights

Life = tuple[int, bool]
"""(steps that it gets through, whether it dies right after it saved the last one's state or before)"""


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_versions_are_the_same_weights_iff_they_are(save_every: int, lives: list[Life]) -> None:
    states = {0: "initial"}
    served: dict[str, str] = {}
    """policy version → weights"""
    history: list[Incarnation] = []
    serial = 0
    for steps, saves_last in lives:
        resumed = max(states)
        number = len(history) + 1
        history.append(Incarnation(number, 0.0, resumed))
        weights = states[resumed]
        before = dict(served)
        served[f"{number}.{resumed}"] = weights
        same = {version for version, name in served.items() if name == weights}
        assert same_weights(history) >= same
        assert {served[version] for version in same_weights(history) if version in before} <= {weights}
        for step in range(resumed + 1, resumed + steps + 1):
            serial += 1
            weights = f"update {serial}"
            last = step == resumed + steps
            if step % save_every == 0 and (saves_last or not last):
                states[step] = weights
            served[f"{number}.{step}"] = weights


def test_a_story() -> None:
    first = Incarnation(1, 0.0, 0)
    second = Incarnation(2, 1.0, 2)
    assert same_weights([first]) == {"1.0"}
    assert same_weights([first, second]) == {"1.2", "2.2"}
    third = Incarnation(3, 2.0, 2)
    assert same_weights([first, second, third]) == {"1.2", "2.2", "3.2"}
    fourth = Incarnation(4, 3.0, 4)
    assert same_weights([first, second, third, fourth]) == {"3.4", "4.4"}
    assert Incarnation.from_json(fourth.to_json()) == fourth
