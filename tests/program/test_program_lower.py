"""Lowering: where tokens lie, who sends what; who speaks to torch.distributed, and orders that always complete."""

import ast
import random
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from testing import draw_lengths, make_plan, random_plan
from testing.order import check_order, rank_groups
from testing.plans import in_turn, with_branches

import lengthwise
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.program import (
    Content,
    Mixing,
    RankRound,
    far_peers,
    last_on_all_ranks,
    line_peers,
    lower_microbatch,
    lower_plan,
    ring_order,
)
from lengthwise.program.spans import halo_round, halo_round_of, sweep_rounds, sweep_rounds_of
from properties import costly

RANDOM = st.randoms(use_true_random=False)
WINDOW = st.none() | st.integers(1, 45)
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


WIDTHS = st.sampled_from([2, 3, 4, 7])


def branched(choose, ranks, count):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=840)
    return with_branches(choose, plan) if choose.random() < 0.6 else plan


def programs_of(plan):
    return [lower_microbatch(plan, index) for index in range(len(plan.microbatches))]


@given(choose=RANDOM, ranks=st.integers(1, 9), count=st.integers(1, 5), width=WIDTHS)
def test_one_ranks_rounds_are_its_part_of_those_of_all_and_reach_only_named_peers(choose, ranks, count, width):
    plan = branched(choose, ranks, count)
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
    plan = branched(choose, ranks, count)
    layers = [Mixing(has_states=True, width=width), None, Mixing(width=width), Mixing(has_states=True), 5]
    assert check_order(plan, windows=layers) >= check_order(plan, windows=[None, 5])


def test_windowed_ring_talks_to_its_neighbours_only_when_the_window_is_short():
    degree = 8
    ring = Piece(ranks=tuple(random.Random(1).sample(range(degree), degree)), sequences=(0,))
    plan = make_plan(degree, [64 * degree], [ring])
    whole, narrow = lower_microbatch(plan, 0), lower_microbatch(plan, 0).with_window(8)
    assert len(whole.forward_rounds) == degree - 1
    assert len(narrow.forward_rounds) == 1, "chunks are 32 tokens, a window of 8 reaches one chunk back"
    sent = sum(t.tokens for each in narrow.forward_rounds for t in each.transfers)
    assert sent <= 2 * 64 * degree
    assert len(narrow.backward_rounds) <= 3
    assert check_order(plan, windows=[8]) > 0


@given(choose=RANDOM, ranks=st.integers(1, 7), count=st.integers(1, 5), window=st.integers(1, 45))
def test_windowed_blocks_can_be_said_with_windows_that_count_from_the_last_key(choose, ranks, count, window):
    """Flash kernels align queries and keys at their ends, and see no further right than there are keys."""
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count))
    plan = with_branches(choose, plan) if choose.random() < 0.5 else plan
    for rank in range(ranks):
        for whole in lower_plan(plan, rank):
            program = whole.with_window(window)
            for task in (task for ring_step in range(program.ring_steps) for task in program.tasks(rank, ring_step)):
                queries, keys = task.q_stop - task.q_start, task.kv_stop - task.kv_start
                if task.causal:
                    assert keys - queries == task.distance
                elif task.window is not None:
                    assert queries < keys
                    assert keys - queries - task.distance + task.window - 1 >= 0, "the last query sees the last key"


def test_segments_follow_the_cut_of_the_plan_file():
    """Position j holds chunks j and 2d-1-j; chunk k ends at floor(length x cumulative share)."""
    plan = make_plan(3, [13], [Piece(ranks=(2, 0, 1), sequences=(0,))])
    program = lower_microbatch(plan, 0)
    spans = {rank: [(s.start, s.stop) for s in program.segments(rank)] for rank in range(3)}
    assert spans == {2: [(0, 2), (10, 13)], 0: [(2, 4), (8, 10)], 1: [(4, 6), (6, 8)]}
    weighted = make_plan(2, [10], [Piece(ranks=(0, 1), sequences=(0,), shares=(3, 1))])
    program = lower_microbatch(weighted, 0)
    assert [[(s.start, s.stop) for s in program.segments(rank)] for rank in range(2)] == [
        [(0, 3), (6, 10)],
        [(3, 5), (5, 6)],
    ]


SOURCE = Path(lengthwise.__file__).parent


def test_order_b_only_comm_talks_to_torch_distributed_and_in_grouped_calls_alone():
    single, grouped = re.compile(r"\.(isend|irecv|send|recv|(send|recv)_object_list)\("), []
    spoken = re.compile(
        r"torch\.distributed(?!\.elastic)|from torch import .*\bdistributed\b|\bnew_group\b|\binit_process_group\b"
    )
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if not (spoken.search(text) or single.search(text) or ".batch_isend_irecv(" in text):
            continue
        code = code_of(text)
        assert name.startswith("comm/") or not spoken.search(code), name
        for line in code.splitlines():
            assert not single.search(line) or re.search("pipe|conn", line), f"{name}: {line}"
        grouped += [name] * code.count(".batch_isend_irecv(")
    assert len(grouped) == 1
    assert grouped[0].startswith("comm/")


def code_of(text):
    """Return a module's code without comments and texts."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def test_microbatch_last_on_all_ranks_by_hand():
    pieces = [Piece(ranks=ranks, sequences=(i,)) for i, ranks in enumerate([(0, 1), (2,), (1, 2), (3, 0), (3,), (4,)])]
    assert last_on_all_ranks(make_plan(6, [9] * 6, pieces)) == {2, 4, 5}
    beside = make_plan(3, [9, 9, 9], [[pieces[0], pieces[1]], Piece(ranks=(0,), sequences=(2,))])
    assert last_on_all_ranks(beside) == {1}, "all pieces of a microbatch run as one"


@costly
@given(choose=RANDOM, ranks=st.integers(1, 8), count=st.integers(1, 6), heads=st.sampled_from([1, 840]))
def test_order_e_any_plan_with_split_heads_and_any_recomputation_completes(choose, ranks, count, heads):
    plan = random_plan(choose, ranks, draw_lengths(choose, ranks, count), num_heads=heads)
    kinds = [choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches]
    mixed = in_turn(plan, recompute=kinds)
    again = sum(
        len(each.transfers)
        for index, kind in enumerate(kinds)
        if kind == "layer"
        for each in lower_microbatch(plan, index).forward_rounds
    )
    assert check_order(mixed, layers=2) >= check_order(plan, layers=2) + 2 * again
    for windows in ([None, None], [3, None]):
        check_order(mixed, windows=windows, counts_routers=True)


@given(first=st.integers(0, 500), groups=st.integers(1, 40), heads=st.sampled_from([1, 2, 4, 8, 16]))
def test_rings_of_groups_visit_neighbours_group_by_group(first: int, groups: int, heads: int) -> None:
    ring = ring_order(first, groups * heads, heads)
    assert sorted(ring) == list(range(first, first + groups * heads))
    chunks = [ring[place : place + heads] for place in range(0, len(ring), heads)]
    assert all(list(chunk) == list(range(chunk[0], chunk[0] + heads)) for chunk in chunks)
    starts = [chunk[0] for chunk in chunks]
    assert all(abs(a - b) <= 2 * heads for a, b in zip(starts, (*starts[1:], starts[0]), strict=True))


def test_groups_of_heads_stay_in_their_node_where_they_can() -> None:
    assert ring_order(8, 12, 2) == (8, 9, 12, 13, 16, 17, 18, 19, 14, 15, 10, 11)
    for heads in (2, 4, 8):
        ring = ring_order(16, 32, heads)
        assert all(ring[i] // 8 == ring[i - i % heads] // 8 for i in range(32))
