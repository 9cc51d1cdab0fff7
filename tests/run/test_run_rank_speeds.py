"""A slow rank in a run, on a machine whose seconds are known: found, named and planned for, without a clock."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cost.test_cost_fit import machine
from lengthwise.cost.rank_speeds import RanStep
from lengthwise.engine.batch import random_batch
from lengthwise.planner import PlanOptions, score
from lengthwise.planner.service.slow_ranks import SlowRanks
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.session.planning import SessionPlanning

RANKS = 4
TRUE = replace(machine(curve=((1.0, 1.0),), hop=1e-4), heads=4)


def run_of(*, factors=(1, 1, 1), speeds=(1.0,) * RANKS, recompute="none", steps=20, sequences=8, **options):
    """Plan and "run" steps on a machine of costs `TRUE`; those of plans are off by `factors`. Return what came out."""
    rng = np.random.default_rng(0)
    names = ("quadratic_seconds", "linear_seconds", "fixed_seconds")
    cost = replace(TRUE, **{name: getattr(TRUE, name) * factor for name, factor in zip(names, factors, strict=True)})
    options = PlanOptions(**{"layers": 2, "planner": "lengthwise", **options})
    planning = StepPlanning(ranks=RANKS, cost=cost, capacities={recompute: 2048}, options=options)
    slow, plans, notes = SlowRanks(), [], []
    for _ in range(steps + 1):
        lengths = np.minimum(6000, np.exp(rng.normal(6, 1.2, sequences)).astype(int) + 1).tolist()
        plans.append(slow.planned_for(planning).plan(lengths))  # while the step before it runs
        if len(plans) > 1:
            busy = np.array(score(plans[-2], TRUE, speeds=[1.0] * RANKS).busy_seconds) / np.array(speeds)
            noisy = tuple((busy * np.exp(0.02 * rng.standard_normal(RANKS))).tolist())
            notes.append(slow.observe(planning, RanStep(plan=plans[-2], busy_seconds=noisy)))
    return slow, plans, list(filter(None, notes))


def test_a_slow_rank_is_known_within_20_steps():
    slow, _, (note,) = run_of(speeds=(1.0, 1.0, 0.5, 1.0), planner="bytescale")
    assert slow.speeds == pytest.approx((1.0, 1.0, 0.5, 1.0), abs=0.101)
    assert note.startswith("rank 2 computes at 50")
    assert "no less work" in note, "planner bytescale does not plan with speeds"


@pytest.mark.parametrize(
    ("recompute", "options", "said"),
    [
        ("layer", {}, "less work"),
        ("all_but_attention", {"heads": 2}, "no ring splits heads"),
        ("none", {"mode": "waves"}, "no less work"),
        ("none", {"offload": "auto"}, "no less work"),
    ],
)
def test_steps_are_planned_beside_a_slow_rank_and_what_is_left_out_is_said_once(recompute, options, said):
    speeds = (1.0, 1.0, 0.5, 1.0)
    slow, plans, (note,) = run_of(speeds=speeds, recompute=recompute, steps=8, sequences=3, **options)
    assert min(slow.speeds) < 0.7
    assert said in note
    assert ("speeds" in plans[-1].notes) == ("no less work" not in note)


@pytest.mark.parametrize("factors", [(5.0, 5.0, 5.0), (0.7, 1.3, 1.0)])
def test_ranks_that_are_alike_are_not_taken_for_slow_ones_where_costs_are_off(factors):
    slow, _, notes = run_of(factors=factors, planner="bytescale", steps=10)
    assert slow.speeds is None
    assert notes == []


def planning_of(*, ranks=RANKS):
    return StepPlanning(ranks=ranks, cost=TRUE, capacities={"none": 2048}, options=PlanOptions(layers=2))


def test_a_session_with_measured_costs_plans_ahead_for_its_slow_rank():
    planning = planning_of()
    planned = SessionPlanning(chunked=planning, whole=planning, slow_ranks=SlowRanks())
    process = SimpleNamespace(plan=lambda planning, lengths, *_: (planning.options.speeds, lengths))
    ahead, batch = planned.start(process), random_batch([900, 400, 300, 200], vocab=9)
    assert ahead(batch) == (None, batch.lengths)
    plan = planning.plan(batch.lengths)
    busy = np.array(score(plan, TRUE, speeds=[1.0] * RANKS).busy_seconds) * (1, 1, 2, 1)
    notes = [planned.observe(RanStep(plan=plan, busy_seconds=tuple(busy))) for _ in range(10)]
    assert sum(map(bool, notes)) == 1
    assert ahead(batch) == ((1.0, 1.0, 0.5, 1.0), batch.lengths)


def test_a_session_without_measured_costs_plans_the_same_beside_a_slow_rank_and_stages_are_not_compared():
    planning = planning_of()
    planned = SessionPlanning(chunked=planning, whole=planning)
    plan = planning.plan([900, 400, 30])
    assert [planned.observe(RanStep(plan=plan, busy_seconds=(5.0, 1.0, 1.0, 1.0))) for _ in range(30)] == [None] * 30
    predicted = plan.notes["predicted_seconds"] + TRUE.step_end_seconds(RANKS)
    assert planned.predicted_step_seconds(plan) == pytest.approx(predicted)
    planning = planning_of(ranks=2)
    ran, slow = RanStep(plan=planning.plan([900, 400]), busy_seconds=(5.0, 1.0, 1.0, 1.0)), SlowRanks()
    assert [slow.observe(planning, ran) for _ in range(9)] == [None] * 9
