"""FlexSP's program on small steps, against every grouping there is."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost
from lengthwise.planner import score
from lengthwise.planner.baselines.flexsp import equal_runs, plan_flexsp
from lengthwise.planner.baselines.single_degree import room_tokens
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan
from properties import costly

COSTS = st.builds(
    Cost,
    quadratic_seconds=st.sampled_from([0.0, 1.0]),
    linear_seconds=st.sampled_from([1.0, 40.0]),
    fixed_seconds=st.sampled_from([0.0, 900.0]),
    ring_seconds=st.sampled_from([0.0, 9.0, 60.0]),
    hop_seconds=st.sampled_from([0.0, 70.0]),
)


def _plan(tokens: Sequence[int], ranks: int, capacity: int, cost: Cost) -> Plan:
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    microbatches = plan_flexsp(PlanRequest(tokens=tuple(tokens), cluster=cluster, cost=cost))
    plan = Plan(ranks=ranks, layers=1, capacity=capacity, tokens=tuple(tokens), microbatches=tuple(microbatches))
    check_plan(plan)
    return plan


def _groupings(ranks: int) -> Iterator[tuple[int, ...]]:
    for number in range(1, ranks + 1):
        for degrees in itertools.combinations_with_replacement((1, 2, 4), number):
            if sum(degrees) <= ranks:
                yield degrees


def _least_seconds(tokens: Sequence[int], ranks: int, capacity: int, cost: Cost) -> float:
    """Try every grouping of the ranks and every way to give sequences to groups."""
    best = float("inf")
    for degrees in _groupings(ranks):
        for chosen in itertools.product(range(len(degrees)), repeat=len(tokens)):
            groups = [[tokens[i] for i, group in enumerate(chosen) if group == p] for p in range(len(degrees))]
            pairs = [(group, degree) for group, degree in zip(groups, degrees, strict=True) if group]
            if all(room_tokens(np.array(group), degree).sum() <= degree * capacity for group, degree in pairs):
                slowest = max(cost.fixed_seconds + cost.piece_seconds(group, degree) for group, degree in pairs)
                best = min(best, slowest)
    return best


@costly
@given(tokens=st.lists(st.integers(1, 40), min_size=1, max_size=4), cost=COSTS)
def test_flexsp_finds_the_best_groups_of_one_micro_batch(tokens: list[int], cost: Cost) -> None:
    plan = _plan(tokens, 4, 100, cost)
    best = _least_seconds(tokens, 4, 100, cost)
    if len(plan.microbatches) == 1:
        assert score(plan, cost).makespan_seconds == pytest.approx(best, rel=2e-3)
    assert score(plan, cost).makespan_seconds <= best * (1 + 2e-3)


def test_flexsp_gives_a_long_sequence_a_wide_group_beside_narrow_ones() -> None:
    cost = Cost(linear_seconds=1.0, ring_seconds=5.0)
    plan = _plan([40, 10, 10, 10, 10], 8, 10, cost)
    (microbatch,) = plan.microbatches
    assert [(piece.degree, piece.sequences) for piece in microbatch.pieces[:1]] == [(4, (0,))]
    assert len(microbatch.pieces) > 1
    assert max(piece.degree for piece in microbatch.pieces[1:]) < 4
    assert score(plan, cost).makespan_seconds == 40 / 4 + 3 * 40 * 5 / 4  # of the long sequence: the others end earlier


def test_equal_runs_have_the_least_largest_sum() -> None:
    lengths = np.array([9, 7, 5, 4, 3, 2])
    assert equal_runs(np.arange(6), lengths, 1) == [[0, 1, 2, 3, 4, 5]]
    assert equal_runs(np.arange(6), lengths, 2) == [[0, 1], [2, 3, 4, 5]]
    assert [sum(lengths[run]) for run in equal_runs(np.arange(6), lengths, 3)] == [9, 12, 9]


@costly
@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 120), min_size=1, max_size=12),
    ranks=st.sampled_from([1, 2, 3, 5, 6, 8]),
    cost=COSTS,
)
def test_flexsp_plans_any_small_step_with_powers_of_two(tokens: list[int], ranks: int, cost: Cost) -> None:
    tokens = [min(length, 29 * ranks) for length in tokens]
    plan = _plan(tokens, ranks, 29, cost)
    for microbatch in plan.microbatches:
        assert sum(piece.degree for piece in microbatch.pieces) == len(microbatch.ranks)
        for piece in microbatch.pieces:
            assert piece.degree == ranks or piece.degree & (piece.degree - 1) == 0
