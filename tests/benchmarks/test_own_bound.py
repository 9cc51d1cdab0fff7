"""The bound that benchmarks divide a plan by is that of its kind: the one that the planner notes."""

from dataclasses import replace

import pytest

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import Cluster
from lengthwise.planner import CUTTING_PLANNERS, PlanOptions, plan_step, score
from own_bound import own_bound_seconds
from pages import modelled_gain
from planners import TERMS

CLUSTER = Cluster(ranks=4, capacity_tokens=8192)
LENGTHS = [20_000, 9000, 5000, 3000, *[400] * 30]


@pytest.mark.parametrize("planner", CUTTING_PLANNERS)
@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(mode="pipeline", stages=2, virtual=2)])
def test_own_bound_is_the_one_in_the_notes(planner, options) -> None:
    asked = replace(options, planner=planner, layers=32)
    plan = plan_step(LENGTHS, CLUSTER, TERMS, asked)
    assert own_bound_seconds(plan, TERMS) == pytest.approx(plan.notes["bound_seconds"], rel=1e-9)


def test_own_bound_of_cut_packs_is_below_that_of_lone_rings() -> None:
    """Short sequences cut together owe one microbatch: less than any plan of lone rings owes."""
    every = Piece(ranks=(0, 1, 2, 3), sequences=tuple(range(8)))
    cut = _plan([8000] * 8, Microbatch(pieces=(every,)))
    alone = [Microbatch(pieces=(replace(every, sequences=(i,)),)) for i in range(8)]
    lone = _plan([8000] * 8, *alone)
    assert own_bound_seconds(cut, TERMS) < own_bound_seconds(lone, TERMS)
    for plan in (cut, lone):
        assert own_bound_seconds(plan, TERMS) <= score(plan, TERMS).makespan_seconds


def _plan(tokens: list[int], *microbatches: Microbatch) -> Plan:
    return Plan(ranks=4, layers=1, capacity=16_384, tokens=tuple(tokens), microbatches=microbatches)


@pytest.mark.parametrize(
    ("other", "written"), [(1.06, "1.06x"), (1.04, "equal (1.04x)"), (0.96, "equal (0.96x)"), (0.94, "0.94x")]
)
def test_gains_within_the_models_error_are_equal_however_batches_differ(other: float, written: str) -> None:
    assert modelled_gain([other - 0.9, 0.9, other], [0.1, 0.9, 1.0]) == written
