"""Costs that follow a run: what its steps tell replaces what was assumed, all else keeps its proportion."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan

from cost.test_cost_fit import machine
from lengthwise.core.plan import Piece
from lengthwise.cost.passes import parts_by_shares
from lengthwise.cost.refit import STEPS, RanStep, rank_speeds, refit


def work_of(plan, cost):
    """What each rank of a plan without recomputation does not wait for, written another way."""
    busy = np.zeros(plan.ranks)
    for microbatch in plan.microbatches:
        busy[list(microbatch.ranks)] += cost.fixed_seconds
        for piece in microbatch.pieces:
            for sequence in piece.sequences:
                tokens = plan.tokens[sequence]
                seconds = cost.quadratic_seconds * tokens**2 + cost.linear_seconds * tokens
                busy[list(piece.ranks)] += seconds / piece.degree
    return busy


def ran(lengths, cost, noise=0.0, rng=None):
    a, b, *rest = range(len(lengths))
    pieces = [Piece(ranks=(0, 1), sequences=(a,)), Piece(ranks=(0,), sequences=(b,))]
    pieces += [Piece(ranks=(1,), sequences=(i,)) for i in rest]
    plan = make_plan(2, lengths, pieces)
    busy = work_of(plan, cost) * (1 if rng is None else np.exp(noise * rng.standard_normal(2)))
    return RanStep(plan=plan, busy_seconds=tuple(busy.tolist()), step_seconds=float(busy.max()))


LENGTHS = st.lists(st.integers(1, 6000), min_size=2, max_size=6)
FACTOR = st.floats(0.1, 10.0)


@given(st.lists(LENGTHS, min_size=6, max_size=12), FACTOR, FACTOR, FACTOR, st.integers(0, 99))
def test_refit_brings_costs_to_what_the_steps_took(batches, quadratic, linear, fixed, seed):
    true = machine(curve=())
    rng = np.random.default_rng(seed)
    steps = [ran(lengths, true, 0.02, rng) for lengths in batches]
    before = replace(
        true,
        quadratic_seconds=true.quadratic_seconds * quadratic,
        linear_seconds=true.linear_seconds * linear,
        fixed_seconds=true.fixed_seconds * fixed,
    )
    after = refit(before, steps)

    def error(cost):
        pairs = [(work_of(each.plan, cost), np.array(each.busy_seconds)) for each in steps]
        return float(np.mean([np.mean(np.abs(guess / busy - 1)) for guess, busy in pairs]))

    assert error(after) <= max(0.25, 0.7 * error(before))
    assert min(after.quadratic_seconds, after.linear_seconds, after.fixed_seconds) >= 0


@given(LENGTHS, FACTOR)
def test_one_step_of_a_machine_that_is_faster_all_over_changes_the_level_alone(lengths, factor):
    true = machine(curve=())
    names = ("quadratic_seconds", "linear_seconds", "fixed_seconds")
    before = replace(true, **{name: getattr(true, name) * factor for name in names})
    after = refit(before, [ran(lengths, true)])
    for name in names:
        assert getattr(after, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_refit_without_steps_or_work_changes_nothing():
    cost = machine(curve=())
    plan = make_plan(2, (5,), [Piece(ranks=(0,), sequences=(0,))])
    assert refit(cost, []) == cost
    assert refit(cost, [RanStep(plan=plan, busy_seconds=(0.0, 0.0), step_seconds=1.0)]) == cost


def test_refit_forgets_what_is_long_ago():
    slow, quick = machine(quadratic=1e-7, linear=2e-4, fixed=0.02, curve=()), machine(curve=())
    steps = [ran((3000, 400 + i, 900), slow) for i in range(30)]
    steps += [ran((3000, 400 + i, 900), quick) for i in range(STEPS)]
    assert refit(slow, steps).linear_seconds == pytest.approx(quick.linear_seconds, rel=1e-6)


def test_refit_counts_what_is_computed_again():
    true = machine(curve=())
    plan = make_plan(1, (2000,), [Piece(ranks=(0,), sequences=(0,))])
    again = replace(plan, microbatches=(replace(plan.microbatches[0], recompute="layer"),))
    passes = true.passes("layer")
    busy = sum(each.attention for each in passes) * true.quadratic_seconds * 2000**2
    busy += sum(each.linear for each in passes) * (true.linear_seconds * 2000 + true.fixed_seconds)
    after = refit(true, [RanStep(plan=again, busy_seconds=(busy,), step_seconds=busy)])
    assert after.linear_seconds == pytest.approx(true.linear_seconds)


@given(st.lists(LENGTHS, min_size=5, max_size=20), st.floats(0.2, 0.8))
def test_a_slow_rank_is_found_and_the_costs_are_those_of_the_quick_one(batches, speed):
    true = machine(curve=())
    steps = []
    for lengths in batches:
        each = ran(lengths, true)
        steps.append(replace(each, busy_seconds=(each.busy_seconds[0], each.busy_seconds[1] / speed)))
    speeds = rank_speeds(true, steps)
    assert speeds is not None
    assert speeds[0] == 1
    assert speeds[1] == pytest.approx(speed, abs=0.03)
    exact = refit(true, steps, (1.0, speed))
    assert exact.linear_seconds == pytest.approx(true.linear_seconds, rel=1e-6)


@given(st.lists(LENGTHS, min_size=1, max_size=20), st.integers(0, 99))
def test_ranks_that_are_alike_stay_alike(batches, seed):
    rng = np.random.default_rng(seed)
    assert rank_speeds(machine(curve=()), [ran(lengths, machine(curve=()), 0.01, rng) for lengths in batches]) is None


def test_shares_of_a_ring_are_no_slowness():
    true = machine(curve=())
    plan = make_plan(2, (4000,), [Piece(ranks=(0, 1), sequences=(0,), shares=(3.0, 1.0))])
    parts, held = parts_by_shares((4000,), 2, (3.0, 1.0))
    busy = true.fixed_seconds + true.quadratic_seconds * 4000**2 * parts + true.linear_seconds * held
    steps = [RanStep(plan=plan, busy_seconds=tuple(busy.tolist()), step_seconds=1.0)] * 6
    assert rank_speeds(true, steps) is None
