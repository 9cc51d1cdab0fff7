"""Where pieces go: rings on the line of ranks, local packs into gaps and onto level ends, and tiny steps annealed."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing.order import check_order
from testing.plans import make_plan

from lengthwise.core.errors import PlanError
from lengthwise.core.plan import Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.planner import PlanOptions, bound_seconds, plan_step, score
from lengthwise.planner.placement.annealing import MOST_WORK, Annealing, anneal
from lengthwise.planner.placement.level_ends import Bin, level_by_swaps
from lengthwise.planner.problem.effort import CHANGE_SECONDS
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.program import check_plan
from properties import costly

ALL_FOUR = plain_cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)


def test_tiny_steps_cut_packs_over_rings_where_that_wins() -> None:
    """The exact oracle finds 175,203,776 s; two pieces must be dealt anew at once, or it ends 7 % later."""
    plan = plan_step((4918, 6503, 4085), Cluster(ranks=4, capacity_tokens=8192), ALL_FOUR)
    check_plan(plan)
    packs = [piece for each in plan.microbatches for piece in each.pieces if piece.degree > 1]
    assert any(len(piece.sequences) > 1 for piece in packs)
    assert plan.notes["predicted_seconds"] <= 175_203_776.0 * 1.01


def test_tiny_steps_on_ranks_of_unequal_speed_are_annealed_too():
    """Without it the step ends after 0.5274 s, with blocks of this speed."""
    tokens, speeds = (1026, 673, 8628, 1486, 2852, 5935, 1453), (0.75, 1.0, 0.75, 0.5, 1.0, 0.75)
    curve = ((512, 0.53), (1024, 0.7), (2048, 0.84), (4096, 0.93), (8192, 0.97), (16384, 1.0))
    hardware = replace(named_hardware("h100").with_kernel("flash2"), attention_efficiency=0.36, block_efficiency=curve)
    cost = all_terms_cost(named_shape("llama-7b"), hardware)
    plan = plan_step(tokens, Cluster(ranks=len(speeds), capacity_tokens=8192), cost, PlanOptions(speeds=speeds))
    check_plan(plan)
    check_order(plan)
    assert plan.notes["predicted_seconds"] <= 0.5274 * 0.965
    assert plan.notes["predicted_seconds"] >= plan.notes["bound_seconds"]


@costly
@given(
    ranks=st.integers(1, 6),
    tokens=st.lists(st.sampled_from([1, 2, 5, 40, 41, 79]) | st.integers(1, 200), min_size=1, max_size=9),
    launch=st.sampled_from([0.0, 50.0]),
    ring=st.sampled_from([0.0, 3.0]),
)
def test_annealed_plans_are_valid_and_never_later(ranks: int, tokens: list[int], launch: float, ring: float) -> None:
    cost = plain_cost(quadratic_seconds=0.01, linear_seconds=1.0, fixed_seconds=launch, ring_seconds=ring)
    cluster = Cluster(ranks=ranks, capacity_tokens=40)
    tokens = [min(length, cluster.longest_tokens) for length in tokens]
    request = PlanRequest(tokens=tuple(tokens), cluster=cluster, cost=cost)
    start = plan_step(tokens, cluster, cost, PlanOptions(planner="bytescale"))
    before = score(start, cost).makespan_seconds
    assert len(tokens) * ranks <= MOST_WORK
    changed = anneal(request, start.microbatches, before)
    plan = Plan(ranks=ranks, layers=1, capacity=40, tokens=tuple(tokens), microbatches=tuple(changed))
    check_plan(plan)
    check_order(plan)
    after = score(plan, cost).makespan_seconds
    assert bound_seconds(tokens, cluster, cost, lone_rings=False) * (1 - 1e-9) <= after <= before


def test_annealing_holds_no_pack_whose_chunks_pile_up_on_one_rank() -> None:
    """Three tokens over four ranks: one holds two of them. Four such packs are 12 tokens, but 8 on that rank, not 7."""
    cluster = Cluster(ranks=4, capacity_tokens=3)
    request = PlanRequest(tokens=(3, 3, 3, 3), cluster=cluster, cost=Cost(linear_seconds=1.0))
    whole = make_plan(4, request.tokens, [Piece(ranks=(0, 2, 3, 1), sequences=(0, 1, 2, 3))])
    with pytest.raises(PlanError, match="at most 3 tokens held"):
        check_plan(replace(whole, capacity=3))
    search = Annealing(request)
    assert search.fits(4, (0, 1, 2))
    assert not search.fits(4, (0, 1, 2, 3))
    assert not search.fits(1, (0, 1))


TINY = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
TOKENS = [900, 700, 300, 120, 80, 60, 40, 30, 20, 10]
FEW = Cluster(ranks=4, capacity_tokens=300)


def test_tries_are_counted_from_the_bound(monkeypatch) -> None:
    share, placed = 0.1, 0
    place = Annealing.place

    def counted(self, state, *allowed):
        nonlocal placed
        placed += len(state)
        return place(self, state, *allowed)

    monkeypatch.setattr(Annealing, "place", counted)
    plan = plan_step(TOKENS, FEW, TINY, PlanOptions(layers=4, heads="auto", planning_share=share))
    starts = 13 * (len(TOKENS) + 1)  # of six runs, and of the plan before them: not tries
    assert placed <= 2 * share * plan.notes["bound_seconds"] / CHANGE_SECONDS + 2 * starts


def test_thousands_of_sequences_a_rank_are_not_compared_all_with_all() -> None:
    """Of 2 x 5,000 all pairs once took 625 MB; evenly chosen ones level as well."""
    lengths = np.arange(10_000) % 60 + 1
    seconds = lengths.astype(np.float64)
    bins = [[Bin(list(range(5_000)), 0)], [Bin(list(range(5_000, 10_000)), 2_000)]]
    loads = [float(seconds[:5_000].sum()) + 1_001.0, float(seconds[5_000:].sum())]
    tracemalloc.start()
    end = level_by_swaps(loads, bins, lengths, seconds, goal_seconds=0.0, most_swaps=50)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert end <= sum(loads) / 2 + 0.5
    assert peak < 50e6
