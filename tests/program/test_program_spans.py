"""What layers that are no attention pass along: followed span by span and token by token, for all ranks and for one."""

from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, random_plan
from testing.order import check_order
from testing.plans import line_to, with_branches

from lengthwise.program import Content, Mixing, far_peers, line_peers, lower_microbatch, lower_plan, spans_of
from lengthwise.program.records import RankRound
from lengthwise.program.spans import halo_moves, halo_round, halo_round_of, sweep_rounds, sweep_rounds_of

RANDOM, WIDTHS = st.randoms(use_true_random=False), st.sampled_from([2, 3, 4, 7])


def drawn(choose, ranks, count):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=840)
    return with_branches(choose, plan) if choose.random() < 0.6 else plan


def programs_of(plan):
    return [lower_microbatch(plan, index) for index in range(len(plan.microbatches))]


@given(choose=RANDOM, ranks=st.integers(1, 8), count=st.integers(1, 5))
def test_spans_hold_every_token_once_in_local_order(choose, ranks, count):
    for program in programs_of(drawn(choose, ranks, count)):
        held = set()
        for rank in program.microbatch.ranks:
            mine = [(s.sequence, s.start, s.stop) for s in program.segments(rank)]
            tokens = [(i, t) for i, start, stop in mine for t in range(start, stop)]
            spans = spans_of(program, rank)
            assert [(s.sequence, t) for s in spans for t in range(s.start, s.stop)] == tokens
            assert all(tokens[s.row] == (s.sequence, s.start) for s in spans if s.stop > s.start)
            held |= {(s.piece, s.sequence, s.number) for s in spans}
        pieces = enumerate(program.microbatch.pieces)
        assert held == {(p, i, n) for p, each in pieces for i in each.sequences for n in range(2 * each.degree - 1)}


@given(choose=RANDOM, ranks=st.integers(1, 8), count=st.integers(1, 5))
def test_a_sweep_tells_each_position_what_is_before_its_low_span_and_between_its_two(choose, ranks, count):
    """States are the spans that they have run through, maps those that they take in; each is sent by who has it.

    Where sequences continue others, they begin with a state that follows from maps of whole sequences.
    """
    for program in programs_of(drawn(choose, ranks, count)):
        places = {
            (index, rank): position
            for index, piece in enumerate(program.microbatch.pieces)
            for position, rank in enumerate(piece.ranks)
        }
        degrees = [piece.degree for piece in program.microbatch.pieces]
        between = {(p, r): (j,) for (p, r), j in places.items() if j == degrees[p] - 1}
        before = {}
        for each in sweep_rounds(program):
            know_start = (place for place in places if place in between or not program.has_branches(place[0]))
            before |= {place: () for place in know_start if places[place] == 0}
            arrivals = []
            for t in each.transfers:
                here, there = (t.piece, t.source), (t.piece, t.target)
                position, last = places[here], degrees[t.piece] - 1
                assert t.tokens == len(program.microbatch.pieces[t.piece].sequences)
                if t.content == Content.STATE:
                    arrivals.append((before, there, (*before[here], position)))
                else:
                    whole = (position, *between[here], 2 * last - position) if position < last else between[here]
                    arrivals.append((between, there, whole))
            for into, there, spans in arrivals:
                assert there not in into, "everything arrives once"
                into[there] = spans
        for place, position in places.items():
            assert before.get(place, ()) == tuple(range(position))
            last = degrees[place[0]] - 1
            assert between[place] == ((last,) if position == last else tuple(range(position + 1, 2 * last - position)))


@given(choose=RANDOM, ranks=st.integers(1, 8), count=st.integers(1, 5), width=WIDTHS)
def test_before_each_span_go_the_tokens_that_a_convolution_reads(choose, ranks, count, width):
    plan = drawn(choose, ranks, count)
    for program in programs_of(plan):
        spans = {s.key: s for rank in program.microbatch.ranks for s in spans_of(program, rank)}
        before = {key: [] for key in spans}
        for move in halo_moves(program, width):
            source = spans[move.source]
            assert source.piece == spans[move.target].piece == move.piece
            assert source.start <= move.start < move.stop <= source.stop
            before[move.target] += [(source.sequence, token) for token in range(move.start, move.stop)]
        for key, span in spans.items():
            line = line_to(plan, span.sequence)
            text = [(each, token) for each in line for token in range(plan.tokens[each])]
            start = len(text) - plan.tokens[span.sequence] + span.start
            assert before[key] == (text[max(0, start - width + 1) : start] if span.stop > span.start else [])


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
