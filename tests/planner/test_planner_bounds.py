"""Bounds below every plan there is, and how near to them plans end."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from testing.plans import make_plan

from lengthwise.core.cut import local_tokens
from lengthwise.core.plan import Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.cost.links import crosses_node
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import bound_seconds, plan_step, score
from lengthwise.program import check_plan
from planner.partitions import partitions
from properties import costly

Held = tuple[tuple[int, ...], tuple[int, ...]]  # ranks, lengths

SIMPLE_COSTS = st.builds(
    plain_cost,
    quadratic_seconds=st.sampled_from([0.0, 1.0]),
    linear_seconds=st.sampled_from([1.0, 40.0]),
    fixed_seconds=st.sampled_from([0.0, 100.0, 3000.0]),
    ring_seconds=st.sampled_from([0.0, 9.0, 200.0]),
    hop_seconds=st.sampled_from([0.0, 70.0]),
)
FEW = st.lists(st.integers(1, 30), min_size=1, max_size=3)


def _fits(microbatch: Sequence[Held], ranks: int, capacity: int, *, rounding: bool = True) -> bool:
    for rank in range(ranks):
        held = allowed = 0
        for where, lengths in microbatch:
            if rank in where:
                held += local_tokens(lengths, len(where), where.index(rank))
                allowed += len(lengths) if len(where) > 1 and rounding else 0
        if held > capacity + allowed:
            return False
    return True


def _is_lone(where: Sequence[int], lengths: Sequence[int], capacity: int) -> bool:
    return len(where) == 1 or (len(lengths) == 1 and lengths[0] <= len(where) * capacity)


def _makespan(microbatches: Sequence[Sequence[Held]], ranks: int, cost: Cost) -> float:
    free = [0.0] * ranks
    for microbatch in microbatches:
        named = {rank for where, _ in microbatch for rank in where}
        start = max(free[rank] for rank in named)
        for rank in named:
            own = [cost.piece_seconds(lengths, len(where)) for where, lengths in microbatch if rank in where]
            free[rank] = start + cost.fixed_seconds + sum(own)
    return max(free)


def _least_makespan(lengths, ranks, capacity, cost, *, lone, shared=False):
    """Try every plan. lone: rings of one sequence, alone; shared: beside others, no rank above the capacity then."""
    places = [where for n in range(1, ranks + 1) for where in itertools.combinations(range(ranks), n)]
    best = float("inf")
    for groups in partitions(range(len(lengths))):
        for chosen in itertools.product(places, repeat=len(groups)):
            pieces = [(where, tuple(lengths[i] for i in group)) for where, group in zip(chosen, groups, strict=True)]
            if (lone or shared) and not all(_is_lone(where, group, capacity) for where, group in pieces):
                continue
            joined = [[[i] for i in range(len(pieces))]] if lone else partitions(range(len(pieces)))
            for together in joined:
                microbatches = [[pieces[i] for i in group] for group in together]
                if all(_fits(each, ranks, capacity, rounding=not shared or len(each) == 1) for each in microbatches):
                    for order in itertools.permutations(microbatches):
                        best = min(best, _makespan(order, ranks, cost))
    return best


@costly
@given(lengths=FEW, capacity=st.integers(10, 30), cost=SIMPLE_COSTS)
@example(
    lengths=[1, 2, 30], capacity=29, cost=plain_cost(quadratic_seconds=1.0, linear_seconds=1.0, ring_seconds=200.0)
)
@example(lengths=[12, 12, 8], capacity=10, cost=Cost(linear_seconds=1.0, fixed_seconds=3000.0))
def test_bounds_are_below_every_plan_on_two_ranks(lengths, capacity, cost):
    lengths = [min(length, 2 * capacity) for length in lengths]
    cluster = Cluster(ranks=2, capacity_tokens=capacity)
    lone, weaker = (bound_seconds(lengths, cluster, cost, lone_rings=lone) for lone in (True, False))
    shared = bound_seconds(lengths, cluster, cost, shared_launches=True)
    assert lone <= _least_makespan(lengths, 2, capacity, cost, lone=True) * (1 + 1e-9)
    assert weaker <= _least_makespan(lengths, 2, capacity, cost, lone=False) * (1 + 1e-9)
    assert shared <= _least_makespan(lengths, 2, capacity, cost, lone=False, shared=True) * (1 + 1e-9)
    assert shared <= lone * (1 + 1e-9)


def test_weaker_bound_knows_that_allowances_of_short_sequences_save_launches_of_long_ones() -> None:
    cost, cluster = Cost(fixed_seconds=1.0), Cluster(ranks=2, capacity_tokens=10)
    pieces = (Piece(ranks=(0, 1), sequences=tuple(range(12))), Piece(ranks=(1, 0), sequences=tuple(range(12, 24))))
    plan = replace(make_plan(2, (*[1] * 10, 10, 10) * 2, [pieces]), capacity=10)
    check_plan(plan)
    assert bound_seconds(plan.tokens, cluster, cost, lone_rings=False) <= score(plan, cost).makespan_seconds


LAUNCH = Cost(linear_seconds=1.0, fixed_seconds=30.0)


@pytest.mark.parametrize(
    ("tokens", "ranks", "capacity", "cost", "options", "expected"),
    [
        # the work over the ranks where nothing is long, and else the quickest time of the longest
        ([400], 1000, 400, plain_cost(linear_seconds=1.0, hop_seconds=1.0, fixed_seconds=3.0), {}, 400 / 20 + 19 + 3),
        # a launch on each rank of a ring; transfers that nothing hides
        ([100, 60], 2, 60, LAUNCH, {"whole_launches": False}, (100 + 2 * 30 + 60 + 30) / 2),
        ([100], 2, 50, plain_cost(linear_seconds=1.0, ring_seconds=7.0), {}, (100 + 700) / 2),
        # a shared launch for a capacity of tokens: 1.5 a rank. One that runs one is done after 61 tokens, so whole: two
        ([100, 40, 40], 2, 60, LAUNCH, {"shared_launches": True, "whole_launches": False}, (180 + 180 / 60 * 30) / 2),
        ([100, 40, 40], 2, 60, LAUNCH, {"shared_launches": True}, (180 + 4 * 30) / 2),
    ],
)
def test_bound_by_hand(tokens, ranks, capacity, cost, options, expected):
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    assert bound_seconds(tokens, cluster, cost, **options) == pytest.approx(expected)


def test_the_bound_of_denormal_costs_is_found() -> None:
    """Halving between neighbouring numbers never came closer than they are: once without end."""
    cost = Cost(linear_seconds=1e-320, fixed_seconds=1e-320)
    assert bound_seconds([9, 5, 3], Cluster(ranks=2, capacity_tokens=16), cost) >= 0.0


SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
FULL_HEADS = all_terms_cost(replace(SHAPE, kv_heads=32), HARDWARE)


def test_growth_goes_below_the_floor_where_ranks_would_only_wait() -> None:
    plan = plan_step([2000], Cluster(ranks=4, capacity_tokens=2048), Cost(quadratic_seconds=1.0))
    assert plan.microbatches[0].pieces[0].degree == 4  # 512 tokens on a rank, where 1,024 end far from the bound


def test_plan_step_keeps_narrow_rings_inside_nodes() -> None:
    """64 ranks in nodes of 8: once 56 of 252 narrow rings crossed a border, and the plan ended 4.3 % late."""
    cluster = Cluster(ranks=64, capacity_tokens=8192)
    tokens = draw_lengths("github", 2**23, 0, longest_tokens=int(0.98 * cluster.longest_tokens))
    plan = plan_step(tokens, cluster, FULL_HEADS)
    rings = [p for m in plan.microbatches for p in m.pieces if 1 < p.degree <= FULL_HEADS.ranks_per_node]
    assert sum(crosses_node(ring.ranks, FULL_HEADS.ranks_per_node) for ring in rings) <= 0.1 * len(rings)
    assert plan.notes["predicted_seconds"] <= 1.01 * plan.notes["bound_seconds"]
