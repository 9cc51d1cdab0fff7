"""Speeds of ranks by what they did not wait in: a slow rank is found, and work that differs is no slowness."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import make_plan

from cost.test_cost_fit import machine
from lengthwise.core.plan import Piece
from lengthwise.cost.passes import parts_by_shares
from lengthwise.cost.rank_speeds import RanStep, rank_speeds
from properties import costly


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
    return RanStep(plan=plan, busy_seconds=tuple(busy.tolist()))


LENGTHS = st.lists(st.integers(1, 6000), min_size=2, max_size=6)


@costly
@given(st.lists(LENGTHS, min_size=5, max_size=20), st.floats(0.2, 0.8))
def test_a_slow_rank_is_found(batches, speed):
    true = machine(curve=())
    steps = []
    for lengths in batches:
        each = ran(lengths, true)
        steps.append(replace(each, busy_seconds=(each.busy_seconds[0], each.busy_seconds[1] / speed)))
    speeds = rank_speeds(true, steps)
    assert speeds is not None
    assert speeds[0] == 1
    assert speeds[1] == pytest.approx(speed, abs=0.03)


@costly
@given(st.lists(LENGTHS, min_size=1, max_size=20), st.integers(0, 99))
def test_ranks_that_are_alike_stay_alike(batches, seed):
    rng = np.random.default_rng(seed)
    assert rank_speeds(machine(curve=()), [ran(lengths, machine(curve=()), 0.01, rng) for lengths in batches]) is None


def test_shares_prefixes_and_what_is_computed_again_are_no_slowness():
    true = machine(curve=())

    def is_none_slow(plan, pairs, tokens):
        busy = true.fixed_seconds + true.quadratic_seconds * np.array(pairs) + true.linear_seconds * np.array(tokens)
        return rank_speeds(true, [RanStep(plan=plan, busy_seconds=tuple(busy.tolist()))] * 6) is None

    parts, held = parts_by_shares((4000,), 2, (3.0, 1.0))
    shared = make_plan(2, (4000,), [Piece(ranks=(0, 1), sequences=(0,), shares=(3.0, 1.0))])
    assert is_none_slow(shared, 4000**2 * parts, held)
    pieces = [Piece(ranks=(0,), sequences=(0, 1, 2)), Piece(ranks=(1,), sequences=(3,))]
    branches = replace(make_plan(2, (8000, 1000, 1000, 8000), pieces), parents=(None, 0, 0, None))
    assert is_none_slow(branches, [8000**2 + 2 * (9000**2 - 8000**2), 8000**2], [10_000, 8000])
    for kind in ("layer", "all_but_attention"):
        plan = make_plan(2, (2000, 2000), [Piece(ranks=(0,), sequences=(0,)), Piece(ranks=(1,), sequences=(1,))])
        plan = replace(plan, microbatches=(replace(plan.microbatches[0], recompute=kind), *plan.microbatches[1:]))
        passes = true.passes(kind)
        again = sum(each.attention for each in passes) * true.quadratic_seconds * 2000**2
        again += sum(each.linear for each in passes) * (true.linear_seconds * 2000 + true.fixed_seconds)
        assert rank_speeds(true, [RanStep(plan=plan, busy_seconds=(again, work_of(plan, true)[1]))] * 6) is None
