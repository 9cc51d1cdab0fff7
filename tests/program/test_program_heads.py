"""Split heads as data: who sends what in a group, and one rank's part of all rounds."""

from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import rank_groups

from lengthwise.core.plan import Piece
from lengthwise.program import Content, RankRound, far_peers, line_peers, lower_microbatch, lower_plan, ring_order

RANDOM, WINDOW = st.randoms(use_true_random=False), st.none() | st.integers(1, 45)
HEADS = 840  # divided by every degree up to 8
INTO, HOME = (Content.QKV, Content.QKV_OUT, Content.GRAD_OUT), (Content.OUT, Content.DQKV)


def part_of(rank, each):
    """Cut a round of all ranks down to one."""
    sends, receives = ([t for t in each.transfers if getattr(t, side) == rank] for side in ("source", "target"))
    return RankRound(sends=tuple(sends), receives=tuple(receives))


def drawn(choose, ranks, count):
    return random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=HEADS)


@given(choose=RANDOM, ranks=st.integers(1, 9), count=st.integers(1, 6), window=WINDOW)
def test_one_ranks_rounds_are_its_part_of_the_rounds_of_all(choose, ranks, count, window):
    plan = drawn(choose, ranks, count)
    for index in range(len(plan.microbatches)):
        program = lower_microbatch(plan, index).with_window(window)
        for rank in range(ranks):
            assert program.forward_rounds_of(rank) == tuple(part_of(rank, each) for each in program.forward_rounds)
            assert program.backward_rounds_of(rank) == tuple(part_of(rank, each) for each in program.backward_rounds)
            for content in (*INTO, *HOME):
                assert program.exchange_of(rank, content) == part_of(rank, program.exchange(content))


@given(choose=RANDOM, ranks=st.integers(2, 12), count=st.integers(1, 6))
def test_order_c_both_ends_of_an_edge_beyond_the_line_name_it_before_the_first_round(choose, ranks, count):
    plan = drawn(choose, ranks, count)
    peers = {rank: set(far_peers(lower_plan(plan, rank), rank)) for rank in range(ranks)}
    for rank, those in peers.items():
        assert all(rank in peers[peer] and abs(peer - rank) > 2 for peer in those)
        line = {peer for peer in range(ranks) if 0 < abs(peer - rank) <= 2}
        assert set(line_peers(rank, ranks)) == line
        for program in lower_plan(plan, rank):
            contents = [program.exchange_of(rank, content) for content in (*INTO, *HOME)]
            for each in (*contents, *program.forward_rounds_of(rank), *program.backward_rounds_of(rank)):
                for t in (*each.sends, *each.receives):
                    assert {t.source, t.target} - {rank} <= line | those
        first = next(iter(rank_groups(plan, rank, windows=[None])))[0]
        assert (first == "connections") == bool(those)


def test_order_c_rings_over_groups_reach_no_further_than_two_groups():
    for heads, first, groups in ((2, 0, 8), (4, 4, 5), (8, 24, 1), (8, 0, 8)):
        ranks = ring_order(first, groups * heads, heads)
        plan = make_plan(16 * heads, [900], [Piece(ranks=ranks, sequences=(0,), heads=heads)])
        for rank in ranks:
            peers = far_peers(lower_plan(plan, rank), rank)
            assert all(abs(peer - rank) <= 2 * heads for peer in peers)
            assert len(peers) <= heads + 1
