"""What layers that are no attention pass along: the rounds of one rank, and their order; attention proves the rest."""

from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, random_plan
from testing.order import check_order
from testing.plans import with_branches

from lengthwise.program import Mixing, far_peers, line_peers, lower_microbatch, lower_plan
from lengthwise.program.records import RankRound
from lengthwise.program.spans import halo_round, halo_round_of, sweep_rounds, sweep_rounds_of

RANDOM, WIDTHS = st.randoms(use_true_random=False), st.sampled_from([2, 3, 4, 7])


def drawn(choose, ranks, count):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=840)
    return with_branches(choose, plan) if choose.random() < 0.6 else plan


def programs_of(plan):
    return [lower_microbatch(plan, index) for index in range(len(plan.microbatches))]


@given(choose=RANDOM, ranks=st.integers(1, 9), count=st.integers(1, 5), width=WIDTHS)
def test_one_ranks_rounds_are_its_part_of_those_of_all_and_reach_only_named_peers(choose, ranks, count, width):
    plan = drawn(choose, ranks, count)
    for program in programs_of(plan):
        for rank in range(ranks):
            sweeps = [RankRound.of(rank, each.transfers) for each in sweep_rounds(program)]
            assert list(sweep_rounds_of(program, rank)) == [each for each in sweeps if each.sends or each.receives]
            assert halo_round_of(program, rank, width) == RankRound.of(rank, halo_round(program, width).transfers)
    mixing = Mixing(has_states=True, width=width)
    peers = {rank: {*far_peers(lower_plan(plan, rank), rank, mixing)} for rank in range(ranks)}
    assert all(rank in peers[peer] for rank, those in peers.items() for peer in those)
    for program in programs_of(plan):
        for each in (*sweep_rounds(program), halo_round(program, width)):
            assert all(t.target in {*peers[t.source], *line_peers(t.source, ranks)} for t in each.transfers)


@given(choose=RANDOM, ranks=st.integers(2, 7), count=st.integers(1, 5), width=WIDTHS)
def test_order_f_states_and_halos_complete_beside_rings_and_gathers(choose, ranks, count, width):
    plan = drawn(choose, ranks, count)
    layers = [Mixing(has_states=True, width=width), None, Mixing(width=width), Mixing(has_states=True), 5]
    assert check_order(plan, windows=layers) >= check_order(plan, windows=[None, 5])
