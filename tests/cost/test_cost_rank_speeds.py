"""Speeds of ranks by what they did not wait in: work that differs is no slowness (run/test_run_rank_speeds.py)."""

from dataclasses import replace

import numpy as np
from testing import make_plan

from cost.test_cost_fit import machine
from lengthwise.core.plan import Piece
from lengthwise.cost.passes import parts_by_shares
from lengthwise.cost.rank_speeds import RanStep, rank_speeds


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
    once = true.quadratic_seconds * 2000**2 + true.linear_seconds * 2000 + true.fixed_seconds
    for kind in ("layer", "all_but_attention"):
        plan = make_plan(2, (2000, 2000), [Piece(ranks=(0,), sequences=(0,)), Piece(ranks=(1,), sequences=(1,))])
        plan = replace(plan, microbatches=(replace(plan.microbatches[0], recompute=kind), *plan.microbatches[1:]))
        passes = true.passes(kind)
        again = sum(each.attention for each in passes) * true.quadratic_seconds * 2000**2
        again += sum(each.linear for each in passes) * (true.linear_seconds * 2000 + true.fixed_seconds)
        assert rank_speeds(true, [RanStep(plan=plan, busy_seconds=(again, once))] * 6) is None
