"""The bound against every plan there is, for a few sequences on two or three ranks."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.core.cut import local_tokens
from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import bound_seconds, score
from lengthwise.planner.problem.bounds import has_lone_rings, shares_launches_only
from lengthwise.program import check_plan
from planner.partitions import partitions
from properties import costly

Held = tuple[tuple[int, ...], tuple[int, ...]]  # ranks, lengths

COSTS = st.builds(
    Cost,
    quadratic_seconds=st.sampled_from([0.0, 1.0]),
    linear_seconds=st.sampled_from([1.0, 40.0]),
    fixed_seconds=st.sampled_from([0.0, 100.0, 3000.0]),
    ring_seconds=st.sampled_from([0.0, 9.0, 200.0]),
    hop_seconds=st.sampled_from([0.0, 70.0]),
)
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=3)


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


def _least_makespan(
    lengths: Sequence[int], ranks: int, capacity: int, cost: Cost, *, lone: bool, shared: bool = False
) -> float:
    """Try every plan: pieces, their ranks, their microbatches, and every order.

    `lone`: rings of one sequence, alone in a microbatch; `shared`: beside others, no rank above the capacity then.
    """
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
                if all(
                    _fits(microbatch, ranks, capacity, rounding=not shared or len(microbatch) == 1)
                    for microbatch in microbatches
                ):
                    for order in itertools.permutations(microbatches):
                        best = min(best, _makespan(order, ranks, cost))
    return best


@given(lengths=LENGTHS, capacity=st.integers(10, 30), cost=COSTS)
@example(lengths=[1, 2, 30], capacity=29, cost=Cost(quadratic_seconds=1.0, linear_seconds=1.0, ring_seconds=200.0))
def test_bound_is_below_every_plan_on_two_ranks(lengths: list[int], capacity: int, cost: Cost) -> None:
    lengths = [min(length, 2 * capacity) for length in lengths]
    cluster = Cluster(ranks=2, capacity_tokens=capacity)
    for lone in (True, False):
        best = _least_makespan(lengths, 2, capacity, cost, lone=lone)
        assert bound_seconds(lengths, cluster, cost, lone_rings=lone) <= best * (1 + 1e-9)


@given(lengths=LENGTHS, capacity=st.integers(10, 30), cost=COSTS)
@example(lengths=[10, 22], capacity=10, cost=Cost(linear_seconds=1.0, fixed_seconds=3000.0))
def test_bound_is_below_every_plan_of_lone_rings_on_three_ranks(lengths: list[int], capacity: int, cost: Cost) -> None:
    cluster = Cluster(ranks=3, capacity_tokens=capacity)
    best = _least_makespan(lengths, 3, capacity, cost, lone=True)
    assert bound_seconds(lengths, cluster, cost) <= best * (1 + 1e-9)


@given(lengths=LENGTHS, capacity=st.integers(10, 30), cost=COSTS)
@example(lengths=[12, 12, 8], capacity=10, cost=Cost(linear_seconds=1.0, fixed_seconds=3000.0))
def test_bound_of_shared_launches_is_below_every_such_plan(lengths: list[int], capacity: int, cost: Cost) -> None:
    lengths = [min(length, 2 * capacity) for length in lengths]
    cluster = Cluster(ranks=2, capacity_tokens=capacity)
    best = _least_makespan(lengths, 2, capacity, cost, lone=False, shared=True)
    bound = bound_seconds(lengths, cluster, cost, shared_launches=True)
    assert bound <= best * (1 + 1e-9)
    assert bound <= bound_seconds(lengths, cluster, cost) * (1 + 1e-9)


def test_bound_of_shared_launches_counts_a_launch_for_a_capacity_of_tokens() -> None:
    cost = Cost(linear_seconds=1.0, fixed_seconds=30.0)
    cluster = Cluster(ranks=2, capacity_tokens=60)
    bound = bound_seconds([100, 40, 40], cluster, cost, shared_launches=True, whole_launches=False)
    assert bound == pytest.approx((180 + 180 / 60 * 30) / 2)


def test_bound_counts_whole_launches() -> None:
    cost = Cost(linear_seconds=1.0, fixed_seconds=30.0)
    cluster = Cluster(ranks=2, capacity_tokens=60)
    # 1.5 launches a rank: one that runs one is done after 61 tokens at most, so both had better run two
    assert bound_seconds([100, 40, 40], cluster, cost, shared_launches=True) == pytest.approx((180 + 4 * 30) / 2)


@pytest.mark.parametrize(
    ("beside", "shared"), [((0, (4,)), True), ((0, (5,)), False), ((1, (4,)), True), ((1, (6,)), False)]
)
def test_plans_that_share_launches_only_stay_within_the_capacity(
    beside: tuple[int, tuple[int, ...]], shared: bool
) -> None:
    """A ring of 12 over two ranks leaves 4 of 10 on each; a fifth token fits only by the rule for rounding."""
    rank, (length,) = beside
    plan = Plan(
        ranks=2,
        layers=1,
        capacity=10,
        tokens=(12, length),
        microbatches=(Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0,)), Piece(ranks=(rank,), sequences=(1,)))),),
    )
    assert not has_lone_rings(plan)
    assert shares_launches_only(plan) == shared


def test_weaker_bound_knows_that_cut_sequences_let_a_local_one_exceed_the_capacity() -> None:
    """Once 3015: two ranks for 30 tokens, whose transfers nothing hides, where a plan keeps them on one."""
    cost = Cost(quadratic_seconds=1.0, linear_seconds=1.0, ring_seconds=200.0)
    plan = Plan(
        ranks=2,
        layers=1,
        capacity=29,
        tokens=(1, 2, 30),
        microbatches=(Microbatch(pieces=(Piece(ranks=(0, 1), sequences=(0, 1)), Piece(ranks=(1,), sequences=(2,)))),),
    )
    check_plan(plan)
    bound = bound_seconds(plan.tokens, Cluster(ranks=2, capacity_tokens=29), cost, lone_rings=False)
    assert bound <= score(plan, cost).makespan_seconds


def test_weaker_bound_knows_that_allowances_of_short_sequences_save_launches_of_long_ones() -> None:
    cost = Cost(fixed_seconds=1.0)
    cluster = Cluster(ranks=2, capacity_tokens=10)
    plan = Plan(
        ranks=2,
        layers=1,
        capacity=10,
        tokens=(*[1] * 10, 10, 10) * 2,
        microbatches=(
            Microbatch(
                pieces=(
                    Piece(ranks=(0, 1), sequences=tuple(range(12))),
                    Piece(ranks=(1, 0), sequences=tuple(range(12, 24))),
                )
            ),
        ),
    )
    check_plan(plan)
    assert bound_seconds(plan.tokens, cluster, cost, lone_rings=False) <= score(plan, cost).makespan_seconds


@costly
@given(
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 15)),
    capacity=st.integers(5, 14),
    cost=COSTS,
)
def test_weaker_bound_is_below_every_plan_of_short_sequences_on_three_ranks(
    lengths: tuple[int, int, int], capacity: int, cost: Cost
) -> None:
    best = _least_makespan(lengths, 3, capacity, cost, lone=False)
    bound = bound_seconds(lengths, Cluster(ranks=3, capacity_tokens=capacity), cost, lone_rings=False)
    assert bound <= best * (1 + 1e-9)


def test_bound_is_the_work_over_the_ranks_where_nothing_is_long() -> None:
    cost = Cost(linear_seconds=2.0, fixed_seconds=5.0)
    assert bound_seconds([10] * 40, Cluster(ranks=4, capacity_tokens=50), cost) == pytest.approx((2 + 5 / 50) * 400 / 4)


def test_bound_is_the_quickest_time_of_the_longest_where_that_is_more() -> None:
    cost = Cost(linear_seconds=1.0, hop_seconds=1.0, fixed_seconds=3.0)
    quickest = 400 / 20 + 19 + 3
    assert bound_seconds([400], Cluster(ranks=1000, capacity_tokens=400), cost) == pytest.approx(quickest)


def test_bound_charges_a_ring_a_launch_on_each_rank() -> None:
    cost = Cost(linear_seconds=1.0, fixed_seconds=30.0)
    cluster = Cluster(ranks=2, capacity_tokens=60)
    bound = bound_seconds([100, 60], cluster, cost, whole_launches=False)
    assert bound == pytest.approx((100 + 2 * 30 + 60 + 30) / 2)
    assert bound_seconds([100, 60], cluster, cost, lone_rings=False) < (100 + 60 + 60 + 30) / 2


def test_bound_of_a_ring_that_cannot_hide_its_transfers_holds_them() -> None:
    cost = Cost(linear_seconds=1.0, ring_seconds=7.0)
    assert bound_seconds([100], Cluster(ranks=2, capacity_tokens=50), cost) == pytest.approx((100 + 700) / 2)


def test_bound_refuses_what_does_not_fit() -> None:
    with pytest.raises(PlanError, match="sequence 1"):
        bound_seconds([5, 500], Cluster(ranks=2, capacity_tokens=60), Cost(linear_seconds=1.0))


@pytest.mark.parametrize("lone_rings", [True, False])
def test_bound_ends_where_only_rings_cost_anything(lone_rings: bool) -> None:
    cost = Cost(ring_seconds=1.0)
    bound = bound_seconds([100, 5], Cluster(ranks=4, capacity_tokens=50), cost, lone_rings=lone_rings)
    assert 0 <= bound <= 50 * (1 + 1e-9)


def test_the_bound_of_denormal_costs_is_found() -> None:
    """Halving between neighbouring numbers never came closer than they are: once without end."""
    cost = Cost(linear_seconds=1e-320, fixed_seconds=1e-320)
    assert bound_seconds([9, 5, 3], Cluster(ranks=2, capacity_tokens=16), cost) >= 0.0
