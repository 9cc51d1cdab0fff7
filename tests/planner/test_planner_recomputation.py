"""Recomputation chosen for a step, and what a run need not ask the planner: the plan is the same as if it had."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import PlanError
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PLANNING_SHARE, PlanOptions, plan_recomputed, plan_step
from lengthwise.planner.service import step_planning
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.program import check_plan
from tiers import more

SHAPE, HARDWARE = named_shape("llama-7b"), named_hardware("h100")
COST = all_terms_cost(SHAPE, HARDWARE)
SLOW_LINKS = all_terms_cost(SHAPE, replace(HARDWARE, link_bytes_per_second=1e9, node_link_bytes_per_second=1e9))
CAPACITIES = {"none": 4096, "layer": 40_960, "all_but_attention": 16_384}


@pytest.mark.parametrize("planner", ["bytescale", more("lengthwise")])
@pytest.mark.parametrize("cost", [COST, SLOW_LINKS], ids=["h100", "slow links"])
def test_the_kind_that_ends_first_is_kept(planner, cost):
    tokens = [60_000, 3000, 9000, 500]
    plan = plan_recomputed(tokens, 16, cost, CAPACITIES, PlanOptions(planner=planner, layers=32))
    check_plan(plan)
    seconds = {}
    for kind, capacity in CAPACITIES.items():
        options = PlanOptions(planner=planner, layers=32, recompute=kind)
        alone = plan_step(tokens, Cluster(ranks=16, capacity_tokens=capacity), cost, options)
        seconds[kind] = alone.notes["predicted_seconds"]
    (kind,) = {microbatch.recompute for microbatch in plan.microbatches}
    assert plan.notes["predicted_seconds"] == seconds[kind] == min(seconds.values())
    assert plan.capacity == CAPACITIES[kind]


def test_recomputation_pays_where_it_saves_rings_over_slow_links() -> None:
    for cost, kind in ((COST, "none"), (SLOW_LINKS, "layer")):
        plan = plan_recomputed([30_000] * 24, 24, cost, CAPACITIES, PlanOptions(layers=32))
        assert plan.microbatches[0].recompute == kind


def test_kinds_that_cannot_hold_a_sequence_are_left_to_others_that_can() -> None:
    plan = plan_recomputed([70_000], 2, COST, CAPACITIES, PlanOptions(layers=32))
    assert plan.microbatches[0].recompute == "layer"
    with pytest.raises(PlanError, match="2 ranks x 40960 tokens"):
        plan_recomputed([90_000], 2, COST, CAPACITIES, PlanOptions(layers=32))


TINY = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
LENGTHS = (90, 60, 30, 12)


@pytest.mark.parametrize(
    ("capacities", "options", "asked", "offload"),
    [
        ({"none": 200, "layer": 200, "all_but_attention": 200}, {}, {"none": 200}, "off"),
        ({"none": 100, "layer": 200, "all_but_attention": 100}, {}, {"none": 100, "layer": 200}, "off"),
        ({"layer": 100, "all_but_attention": 200}, {}, {"layer": 100, "all_but_attention": 200}, "off"),
        ({"none": 200}, {"offload": "auto"}, {"none": 200}, "off"),  # one rank holds all
        ({"none": 100}, {"offload": "auto"}, {"none": 100}, "auto"),
    ],
)
def test_what_leaves_no_more_room_is_not_planned(monkeypatch, capacities, options, asked, offload):
    seen = []

    def noted(tokens, ranks, cost, given, options):
        seen.append((given, options.offload, options.planning_share))
        return plan_recomputed(tokens, ranks, cost, given, options)

    monkeypatch.setattr(step_planning, "plan_recomputed", noted)
    planning = StepPlanning(ranks=2, cost=TINY, capacities=capacities, options=PlanOptions(layers=8, **options))
    plan = planning.plan(LENGTHS)
    assert seen == [(asked, offload, PLANNING_SHARE)]
    everything = plan_recomputed(LENGTHS, 2, TINY, capacities, PlanOptions(layers=8, context_tokens=90, **options))
    assert plan.notes["predicted_seconds"] == everything.notes["predicted_seconds"]
    assert 0 < PLANNING_SHARE <= 0.2
