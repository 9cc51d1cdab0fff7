"""The best one degree for a step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.held import held_tokens
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, analytic_cost, named_hardware, named_shape
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.single_degree import (
    first_fit_packs,
    least_seconds,
    plan_single_degree,
    room_tokens,
    schedule_at,
)
from lengthwise.planner.problem.request import PlanRequest
from tiers import some

LINEAR = Cost(linear_seconds=1.0)
RING = Cost(linear_seconds=1.0, ring_seconds=2.0)
COSTS = (
    LINEAR,
    RING,
    Cost(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0, hop_seconds=3.0),
    Cost(fixed_seconds=1.0),
)


@pytest.mark.parametrize(
    ("tokens", "cost", "degree", "seconds"),
    [
        ([100, 100, 100, 100], LINEAR, 1, 100.0),  # as quick as any other, and nothing travels
        ([100, 100, 100], LINEAR, 4, 75.0),  # over all four ranks nobody is idle
        ([100, 100, 100], RING, 1, 100.0),  # but transfers would cost 2 x 300 x 3 / 4 more
        ([200, 100, 100], LINEAR, 2, 100.0),  # the longest needs two, so all are cut in two
        ([400, 1], LINEAR, 4, 100.25),
        ([201, 1], LINEAR, 4, 50.5),
    ],
)
def test_single_degree_keeps_the_degree_that_ends_first(
    tokens: list[int], cost: Cost, degree: int, seconds: float
) -> None:
    plan = plan_step(tokens, Cluster(ranks=4, capacity_tokens=100), cost, PlanOptions(planner="single-degree"))
    assert {microbatch.pieces[0].degree for microbatch in plan.microbatches} == {degree}
    assert plan.notes["predicted_seconds"] == seconds


def test_single_degree_groups_are_intervals_and_leave_the_rest_idle() -> None:
    plan = plan_step([300, 299], Cluster(ranks=7, capacity_tokens=100), RING, PlanOptions(planner="single-degree"))
    assert [tuple(sorted(microbatch.ranks)) for microbatch in plan.microbatches] == [(0, 1, 2), (3, 4, 5)]


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 500), min_size=1, max_size=30),
    ranks=st.sampled_from([5, 6, 7, 12, 13]),
    cost=st.sampled_from(COSTS),
)
def test_single_degree_is_the_best_of_all_degrees(tokens: list[int], ranks: int, cost: Cost) -> None:
    request = PlanRequest(tokens=tuple(tokens), cluster=Cluster(ranks=ranks, capacity_tokens=100), cost=cost)
    tried = [schedule_at(request, degree) for degree in range(-(-max(tokens) // 100), ranks + 1)]
    for one in tried:
        assert least_seconds(request, one.degree) <= one.makespan_seconds
    best = min(tried, key=lambda one: (one.makespan_seconds, one.degree))
    assert {microbatch.pieces[0].degree for microbatch in plan_single_degree(request)} == {best.degree}


@given(
    lengths=st.lists(st.integers(1, 30) | st.integers(1, 700), min_size=1, max_size=30),
    degree=st.integers(1, 30),
    capacity=st.integers(1, 99),
)
def test_room_tokens_never_let_a_position_hold_too_much(lengths: list[int], degree: int, capacity: int) -> None:
    lengths = [min(length, degree * capacity) for length in lengths]
    room = room_tokens(np.array(lengths), degree).tolist()
    assert all(length <= needed <= degree * capacity for length, needed in zip(lengths, room, strict=True))
    pack: list[int] = []
    left = degree * capacity
    for length, needed in zip(lengths, room, strict=True):
        if needed <= left:
            pack.append(length)
            left -= needed
    assert held_tokens(pack, degree).max() <= capacity + (len(pack) if degree > 1 else 0)


@pytest.mark.parametrize("recipe", some(["github", "byted", "prolong", "wikipedia"], 0))
def test_single_degree_is_not_behind_the_static_mesh(recipe: str) -> None:
    """Here the mesh of `static` is all 64 ranks, one of the degrees tried; like lengths alone end 2.5 % behind it."""
    cost = analytic_cost(named_shape("llama-7b"), named_hardware("h100"))
    tokens = draw_lengths(recipe, 2**23, 0, longest_tokens=400_000)
    took = {
        name: plan_step(tokens, Cluster(ranks=64, capacity_tokens=8192), cost, PlanOptions(planner=name)).notes[
            "predicted_seconds"
        ]
        for name in ("static", "single-degree")
    }
    assert took["single-degree"] <= 1.002 * took["static"]


@given(needed=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_each_sequence_goes_to_the_first_pack_with_room(needed: list[int]) -> None:
    left: list[int] = []
    packs: list[list[int]] = []
    for i, room in enumerate(needed):
        number = next((number for number, free in enumerate(left) if free >= room), len(left))
        if number == len(left):
            left.append(50)
            packs.append([])
        left[number] -= room
        packs[number].append(i)
    assert first_fit_packs(np.array(needed, dtype=np.int64), 50) == packs
