"""Costs corrected by a run's steps, on a machine whose seconds are known: how well they predict, without a clock."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from cost.test_cost_fit import machine
from lengthwise.core.plan import Plan
from lengthwise.cost.refit import RanStep
from lengthwise.planner import PlanOptions, score
from lengthwise.planner.service.step_planning import StepPlanning
from lengthwise.run.pricing import Pricing
from lengthwise.simulator import simulate_plan

RANKS, STEPS = 4, 20


@dataclass
class RunOf:
    """As much of a job as pricing asks for."""

    planning: StepPlanning
    ranks: int = RANKS
    replicas: int = RANKS


class Planner:
    """Plans in this process."""

    def plan(self, planning, lengths):
        return planning.plan(lengths).to_json(), 0.0


def run_of(cost, true, *, noise, rest_seconds=0.0, speeds=None, recompute="none", steps=STEPS, sequences=8, **options):
    """Plan and "run" steps on a machine of `true` costs; return errors of predictions, the pricing and its notes."""
    rng = np.random.default_rng(0)
    planning = StepPlanning(
        ranks=RANKS,
        cost=cost,
        capacities={recompute: 2048},
        options=PlanOptions(**{"layers": 2, "planner": "bytescale", **options}),
    )
    pricing, errors, ahead, notes = Pricing(RunOf(planning), corrects=True), [], [], []
    for _ in range(steps + 1):
        lengths = np.minimum(6000, np.exp(rng.normal(6, 1.2, sequences)).astype(int) + 1).tolist()
        ahead.append(Plan.from_json(pricing.plan(Planner(), lengths)[0]))  # while the step before it runs
        if len(ahead) == 1:
            continue
        plan = ahead[-2]
        predicted = pricing.predicted_step_seconds(plan)
        pace = np.exp(noise * rng.standard_normal(RANKS))
        exact = score(plan, true, speeds=[1.0] * RANKS)
        seconds = float(np.exp(noise * rng.standard_normal())) * (
            exact.makespan_seconds if speeds else work(plan, true)
        )
        seconds += true.step_end_seconds(RANKS) + rest_seconds
        errors.append(abs(predicted / seconds - 1))
        busy = tuple((np.array(exact.busy_seconds) * pace / np.array(speeds or [1.0] * RANKS)).tolist())
        notes.append(pricing.observe(RanStep(plan=plan, busy_seconds=busy, step_seconds=seconds)))
    return errors, pricing, list(filter(None, notes))


def work(plan, true):
    """Seconds of a plan of any version of the costs, its ranks alike, up to the step's end."""
    notes = {name: value for name, value in plan.notes.items() if name != "speeds"}
    return float(simulate_plan(replace(plan, notes=notes), true).work_end_seconds.max())


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (5.0, 5.0, 5.0), (0.2, 3.0, 0.5)])
def test_steps_are_predicted_to_10_percent_after_10_of_them(factors):
    true = machine(curve=((1.0, 1.0),), hop=1e-4)
    names = ("quadratic_seconds", "linear_seconds", "fixed_seconds")
    values = {name: getattr(true, name) * factor for name, factor in zip(names, factors, strict=True)}
    errors, *_ = run_of(replace(true, **values), true, noise=0.03, rest_seconds=0.05)
    assert np.mean(errors[10:]) <= 0.10
    assert np.mean(errors[10:]) <= np.mean(errors[:2])


def test_a_slow_rank_is_known_within_20_steps():
    true = machine(curve=((1.0, 1.0),), hop=1e-4)
    _, pricing, (note,) = run_of(true, true, noise=0.02, speeds=[1.0, 1.0, 0.5, 1.0])
    assert pricing.speeds == pytest.approx((1.0, 1.0, 0.5, 1.0), abs=0.101)
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
    true = replace(machine(curve=((1.0, 1.0),), hop=1e-4), heads=4)
    options = {"planner": "lengthwise", "recompute": recompute, **options}
    _, pricing, (note,) = run_of(true, true, noise=0.02, speeds=[1.0, 1.0, 0.5, 1.0], steps=8, sequences=3, **options)
    assert min(pricing.speeds) < 0.7
    assert said in note


def test_costs_stay_as_they_are_where_nothing_is_to_be_corrected():
    cost = machine(curve=((1.0, 1.0),))
    planning = StepPlanning(ranks=RANKS, cost=cost, capacities={"none": 2048}, options=PlanOptions(layers=2))
    pricing = Pricing(RunOf(planning), corrects=False)
    plan = planning.plan([300, 5000])
    pricing.observe(RanStep(plan=plan, busy_seconds=(9.0,) * RANKS, step_seconds=9.0))
    assert pricing.cost is cost
    predicted = plan.notes["predicted_seconds"] + cost.step_end_seconds(RANKS)
    assert pricing.predicted_step_seconds(plan) == pytest.approx(predicted)
