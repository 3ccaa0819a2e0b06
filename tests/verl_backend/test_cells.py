"""Rows dealt into mini-batches, ranks and micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from kitestring_trainer.verl_backend.cells import NO_OP, deal

ROWS = st.lists(st.tuples(st.integers(2, 400), st.integers(0, 3)), max_size=60)


@given(rows=ROWS, ranks=st.integers(1, 4), budget=st.integers(1, 4000), data=st.data())
def test_every_member_once_in_its_mini_batch_and_cells_alike(rows, ranks, budget, data):
    lengths, mini_batch_of = [r[0] for r in rows], [r[1] for r in rows]
    members = [i for i in range(len(rows)) if data.draw(st.booleans())]
    layout = deal(lengths, mini_batch_of, members, ranks, budget)

    assert sorted(i for i in layout.order if i != NO_OP) == members
    assert list(layout.mini_batches) == sorted({mini_batch_of[i] for i in members})
    assert len(layout.order) == ranks * len(layout.mini_batches) * layout.rows_per_cell
    if not members:
        return
    assert layout.rows_per_cell % layout.micro_batch_rows == 0
    longest = max(lengths[i] for i in members)
    assert layout.micro_batch_rows == 1 or layout.micro_batch_rows * longest <= budget
    size, counts = layout.rows_per_cell, {}
    for number in range(ranks * len(layout.mini_batches)):
        place = number % len(layout.mini_batches)
        cell = layout.order[number * size : (number + 1) * size]
        real = [i for i in cell if i != NO_OP]
        assert cell[: len(real)] == tuple(real)
        assert all(mini_batch_of[i] == layout.mini_batches[place] for i in real)
        assert [lengths[i] for i in real] == sorted((lengths[i] for i in real), reverse=True)
        counts.setdefault(place, []).append(len(real))
    assert all(max(c) - min(c) <= 1 for c in counts.values())


def test_two_ranks_two_updates_by_hand():
    # lengths 10 7 5 3 in mini-batch 0, 4 in mini-batch 1; 21 tokens hold two rows of ten
    layout = deal([10, 4, 7, 5, 3], [0, 1, 0, 0, 0], range(5), ranks=2, micro_batch_tokens=21)
    assert layout.order == (0, 4, 1, NO_OP, 2, 3, NO_OP, NO_OP)
    assert (layout.rows_per_cell, layout.micro_batch_rows, layout.no_op_rows) == (2, 2, 3)


def test_a_row_longer_than_the_budget_goes_alone():
    layout = deal([50, 3, 2], [0, 0, 0], range(3), ranks=1, micro_batch_tokens=10)
    assert (layout.rows_per_cell, layout.micro_batch_rows) == (3, 1)
