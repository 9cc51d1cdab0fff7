"""Rings on shelves: every sequence once, like lengths on the same ranks, and ends that the clocks of stages confirm."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster, LayerCut
from lengthwise.cost import Cost, all_terms_cost, named_hardware, named_shape, plain_cost
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import score
from lengthwise.planner.problem.request import PlanRequest
from lengthwise.planner.schedules.pipeline import pipeline_schedule
from lengthwise.planner.schedules.shelves import Shelving, plan_shelves, write_shelves
from lengthwise.planner.search import plan_lengthwise

TERMS = plain_cost(quadratic_seconds=1.0, linear_seconds=32768.0, fixed_seconds=2e7, ring_seconds=4e3)


def _plans(request: PlanRequest) -> list[Plan]:
    schedule = pipeline_schedule(request.cut)
    found = [write_shelves(request, each) for each in plan_shelves(request)]
    return [replace(request.draft(each), layers=64, schedule=schedule, requires=("pipeline",)) for each in found]


def test_rings_of_like_length_follow_on_the_same_ranks() -> None:
    """Four rings of 4 on 8 ranks of 2 stages: two shelves of two, each filled once: (1 + 2) of 100 seconds."""
    cost = Cost(linear_seconds=1.0)
    request = PlanRequest(
        tokens=(400,) * 4, cluster=Cluster(ranks=8, capacity_tokens=100), cost=cost, stages=2, virtual=1
    )
    degrees = request.growth(request.lengths, request.least_degrees).grown(request.bound_seconds)
    shelves = Shelving(request, degrees, counts_filling=True).found(inf)[-1]
    assert Counter(first for _, first, _, _ in shelves.rings) == {0: 2, 4: 2}
    schedule = pipeline_schedule(LayerCut(stages=2))
    plan = replace(request.draft(write_shelves(request, shelves)), schedule=schedule, requires=("pipeline",))
    assert score(plan, cost).makespan_seconds == pytest.approx(300)
    best = min(score(plan, cost).makespan_seconds for plan in _plans(request))
    assert best == pytest.approx(250)  # rings of 8, one after the other: (1 + 4) of 50 seconds


@pytest.mark.parametrize(
    ("recipe", "longest", "gain"), [("github", 262_144, 1.092), ("byted", 524_288, 1.06), ("byted", 262_144, 1.11)]
)
def test_shelves_end_before_plans_for_ranks_without_stages(recipe: str, longest: int, gain: float) -> None:
    """At 262,144 tokens only with both ways to count what is lost."""
    cost = all_terms_cost(named_shape("mixtral-8x22b"), named_hardware("bytescale-gpu"), stages=2)
    tokens = tuple(draw_lengths(recipe, 192 * 43_690, 0, longest_tokens=longest))
    request = PlanRequest(tokens=tokens, cluster=Cluster(ranks=192, capacity_tokens=8192), cost=cost, stages=2)
    staged = score(request.draft(plan_lengthwise(request)), cost).makespan_seconds
    assert min(score(plan, cost).makespan_seconds for plan in _plans(request)) * gain <= staged


def test_shelves_tell_when_their_plans_end() -> None:
    """One number a rank, filling counted, against the clocks of every stage."""
    tokens = tuple(draw_lengths("byted", 64 * 40_000, 1, longest_tokens=200_000))
    request = PlanRequest(tokens=tokens, cluster=Cluster(ranks=64, capacity_tokens=8192), cost=TERMS, stages=2)
    degrees = request.growth(request.lengths, request.least_degrees).grown(request.bound_seconds)
    shelves = Shelving(request, degrees, counts_filling=True).found(inf)[-1]
    schedule = pipeline_schedule(request.cut)
    plan = replace(request.draft(write_shelves(request, shelves)), schedule=schedule, requires=("pipeline",))
    assert score(plan, TERMS).makespan_seconds == pytest.approx(shelves.end_seconds, rel=0.05)
    assert min(score(each, TERMS).makespan_seconds for each in _plans(request)) < 0.86 * shelves.end_seconds
