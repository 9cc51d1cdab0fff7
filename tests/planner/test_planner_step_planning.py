"""What a run leaves to the planner, and what it need not ask: the plan is the same as if it had."""

import pytest

from lengthwise.cost import all_terms_cost, named_hardware, named_shape
from lengthwise.planner import PLANNING_SHARE, PlanOptions, plan_recomputed
from lengthwise.planner.service import step_planning
from lengthwise.planner.service.step_planning import StepPlanning

COST = all_terms_cost(named_shape("tiny"), named_hardware("cpu"))
LENGTHS = (90, 60, 30, 12)


def planning(capacities, **options):
    return StepPlanning(ranks=2, cost=COST, capacities=capacities, options=PlanOptions(layers=8, **options))


@pytest.mark.parametrize(
    ("capacities", "asked"),
    [
        ({"none": 200, "layer": 200, "all_but_attention": 200}, {"none": 200}),
        ({"none": 100, "layer": 200, "all_but_attention": 100}, {"none": 100, "layer": 200}),
        ({"layer": 100, "all_but_attention": 200}, {"layer": 100, "all_but_attention": 200}),
    ],
)
def test_recomputation_that_leaves_no_more_room_is_not_planned(monkeypatch, capacities, asked):
    seen = []

    def noted(tokens, ranks, cost, given, options):
        seen.append(given)
        return plan_recomputed(tokens, ranks, cost, given, options)

    monkeypatch.setattr(step_planning, "plan_recomputed", noted)
    plan = planning(capacities).plan(LENGTHS)
    assert seen == [asked]
    everything = plan_recomputed(LENGTHS, 2, COST, capacities, PlanOptions(layers=8, context_tokens=90))
    assert plan.notes["predicted_seconds"] == everything.notes["predicted_seconds"]


@pytest.mark.parametrize(("capacity", "offload"), [(200, "off"), (100, "auto")])
def test_offload_is_not_planned_where_one_rank_holds_all(monkeypatch, capacity, offload):
    seen = []

    def noted(*arguments):
        seen.append(arguments[-1].offload)
        return plan_recomputed(*arguments)

    monkeypatch.setattr(step_planning, "plan_recomputed", noted)
    plan = planning({"none": capacity}, offload="auto").plan(LENGTHS)
    assert seen == [offload]
    everything = plan_recomputed(
        LENGTHS, 2, COST, {"none": capacity}, PlanOptions(layers=8, offload="auto", context_tokens=90)
    )
    assert plan.notes["predicted_seconds"] == everything.notes["predicted_seconds"]


def test_steps_of_a_run_are_planned_with_a_share_of_their_time(monkeypatch):
    seen = []

    def noted(*arguments):
        seen.append(arguments[-1].planning_share)
        return plan_recomputed(*arguments)

    monkeypatch.setattr(step_planning, "plan_recomputed", noted)
    planning({"none": 200}).plan(LENGTHS)
    assert seen == [PLANNING_SHARE]
    assert 0 < PLANNING_SHARE <= 0.2
