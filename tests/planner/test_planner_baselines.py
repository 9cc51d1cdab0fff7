"""Planners of others: the fixed mesh, one degree a step, and packed data parallelism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError, PlanError
from lengthwise.core.held import held_tokens
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, analytic_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.planner.baselines.single_degree import (
    first_fit_packs,
    least_seconds,
    plan_single_degree,
    room_tokens,
    schedule_at,
)
from lengthwise.planner.baselines.static import context_parallel_degrees
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan

FOUR_TERMS = plain_cost(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0)


@pytest.mark.parametrize(
    ("ranks", "context", "expected"),
    [
        (8, 100, (1,)),
        (8, 101, (2,)),
        (8, 201, (3, 4)),
        (6, 201, (3, 4)),
        (7, 101, (2, 7)),
        (12, 401, (5, 6, 8)),
        (6, 401, (5, 6)),
    ],
)
def test_static_groups_are_exact_a_divisor_or_a_power_of_two(ranks, context, expected):
    assert context_parallel_degrees(Cluster(ranks=ranks, capacity_tokens=100), context) == expected


@pytest.mark.parametrize(
    ("tokens", "ranks", "ring_seconds", "cp", "seconds"),
    [
        ([150, 150, 150], 7, 2.0, 2, 75.0 + 150),  # three groups of the exact size, one rank idle
        ([150], 7, 0.0, 7, 150 / 7),  # one sequence and free transfers: the divisor, all ranks
        ([450, 450, 450, 450], 12, 0.0, 6, 150.0),  # two groups either way: of 6 ranks it is quicker than of 5
        ([250, 250], 9, 20.0, 3, 250 / 3 + 20 * 250 * 2 / 3),  # a group of 4 would only send more
        ([250] * 3, 11, 0.0, 11, 750 / 11),
        ([250] * 4, 11, 0.3, 4, 2 * (250 / 4 + 0.3 * 250 * 3 / 4)),  # two groups of 4; of three of 3 one has two
    ],
)
def test_static_takes_the_mesh_that_ends_first(tokens, ranks, ring_seconds, cp, seconds):
    cost = plain_cost(linear_seconds=1.0, ring_seconds=ring_seconds)
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), cost, PlanOptions(planner="static"))
    assert {microbatch.pieces[0].degree for microbatch in plan.microbatches} == {cp}
    assert plan.notes["predicted_seconds"] == pytest.approx(seconds)


def _static(tokens, context):
    options = PlanOptions(planner="static", context_tokens=context)
    return plan_step(tokens, Cluster(ranks=4, capacity_tokens=100), FOUR_TERMS, options)


def test_static_packs_in_data_order_and_deals_in_turn() -> None:
    pieces = [microbatch.pieces[0] for microbatch in _static([150, 60, 150, 40, 150], 200).microbatches]
    assert [piece.sequences for piece in pieces] == [(0, 3), (1,), (2,), (4,)]
    assert [piece.ranks for piece in pieces] == [(0, 1), (2, 3), (0, 1), (2, 3)]


def test_static_mesh_and_packs_are_of_the_context() -> None:
    """Also without long sequences. Eight would fill two of four ranks; packs of the context keep all of them busy."""
    assert [microbatch.ranks for microbatch in _static([50, 60], 400).microbatches] == [(0, 1, 2, 3)]
    packs = [microbatch.pieces[0] for microbatch in _static([25] * 8, 50).microbatches]
    assert [pack.ranks for pack in packs] == [(0,), (1,), (2,), (3,)]
    assert all(len(pack.sequences) == 2 for pack in packs)


@pytest.mark.parametrize(
    ("tokens", "context", "said"),
    [
        ([50, 150], 100, "sequence 1: expected at most context_tokens = 100 tokens; got 150"),
        ([50, 150], 401, r"context_tokens: .*at most 400 tokens"),
        ([50], 0, "context_tokens"),
    ],
)
def test_static_refuses_contexts_that_do_not_work(tokens, context, said):
    with pytest.raises((ConfigError, PlanError), match=said):
        _static(tokens, context)


LINEAR = Cost(linear_seconds=1.0)
RING = plain_cost(linear_seconds=1.0, ring_seconds=2.0)
SOME_COSTS = (
    LINEAR,
    RING,
    plain_cost(quadratic_seconds=1.0, linear_seconds=1000.0, fixed_seconds=77.0, ring_seconds=500.0, hop_seconds=3.0),
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
def test_single_degree_keeps_the_degree_that_ends_first(tokens, cost, degree, seconds):
    plan = plan_step(tokens, Cluster(ranks=4, capacity_tokens=100), cost, PlanOptions(planner="single-degree"))
    assert {microbatch.pieces[0].degree for microbatch in plan.microbatches} == {degree}
    assert plan.notes["predicted_seconds"] == seconds


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 500), min_size=1, max_size=30),
    ranks=st.sampled_from([5, 6, 7, 12, 13]),
    cost=st.sampled_from(SOME_COSTS),
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


def test_single_degree_is_not_behind_the_static_mesh() -> None:
    """Here the mesh of `static` is all 64 ranks, one of the degrees tried; like lengths alone end 2.5 % behind it."""
    cost, cluster = (
        analytic_cost(named_shape("llama-7b"), named_hardware("h100")),
        Cluster(ranks=64, capacity_tokens=8192),
    )
    tokens = draw_lengths("github", 2**23, 0, longest_tokens=400_000)
    static, single = (
        plan_step(tokens, cluster, cost, PlanOptions(planner=name)).notes["predicted_seconds"]
        for name in ("static", "single-degree")
    )
    assert single <= 1.002 * static


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


PACKED = PlanOptions(planner="packed-dp", layers=32)
ALL_TERMS = all_terms_cost(named_shape("llama-7b"), named_hardware("h100"))


@given(
    tokens=st.lists(st.integers(1, 9) | st.integers(1, 100), min_size=1, max_size=30),
    ranks=st.sampled_from([1, 2, 3, 5, 8]),
    cost=st.sampled_from([FOUR_TERMS, ALL_TERMS]),
)
def test_packed_dp_cuts_nothing_and_ends_no_later_than_packs_in_data_order(tokens, ranks, cost):
    plan = plan_step(tokens, Cluster(ranks=ranks, capacity_tokens=100), cost, PACKED)
    check_plan(plan)
    assert {piece.degree for each in plan.microbatches for piece in each.pieces} == {1}
    loads = [0.0] * ranks
    packs = [[tokens[i] for i in pack] for pack in first_fit_packs(np.array(tokens), 100)]
    for seconds in sorted((cost.fixed_seconds + cost.piece_seconds(pack, 1) for pack in packs), reverse=True):
        loads[loads.index(min(loads))] += seconds
    assert plan.notes["predicted_seconds"] <= max(loads) * (1 + 1e-12)


def test_packed_dp_refuses_a_sequence_longer_than_a_rank_holds_and_says_what_to_change() -> None:
    with pytest.raises(PlanError) as caught:
        plan_step([5, 150, 101, 100], Cluster(ranks=3, capacity_tokens=100), FOUR_TERMS, PACKED)
    told = str(caught.value)
    assert "sequence 1: expected at most 100 tokens" in told
    assert "got 150 tokens, and 1 more" in told
    assert "capacity_tokens to 150" in told
    assert "recompute" in told


@pytest.mark.parametrize("length", [20_000, 40_000])
def test_packed_dp_holds_more_than_the_capacity_with_offload(length: int) -> None:
    """Longer than a rank's capacity, and then longer than that of all ranks."""
    options = PlanOptions(planner="packed-dp", layers=32, offload="auto")
    plan = plan_step([length, 700, 8000], Cluster(ranks=3, capacity_tokens=8192), ALL_TERMS, options)
    check_plan(plan)
    assert {each.pieces[0].degree for each in plan.microbatches} == {1}
    assert max(each.offload for each in plan.microbatches) > 0.5
    with pytest.raises(PlanError, match="packed-dp cuts no sequence"):
        plan_step([length, 700, 8000], Cluster(ranks=12, capacity_tokens=8192), ALL_TERMS, PACKED)
