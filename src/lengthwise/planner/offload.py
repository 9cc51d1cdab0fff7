"""The offload ratio of every microbatch of a plan: the smallest that the plan file's rule allows, 0 where it holds.

A pass over a finished plan of any planner that let ranks hold more than the capacity. All ranks of a microbatch share
one ratio, so the fullest decides. Which layers leave the device is the engine's matter; this version's refuses such
plans.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lengthwise.core.held import held_by_rank
from lengthwise.core.plan import Microbatch, Plan

_DIGITS = 6  # of a ratio; rounded up


def write_offload(plan: Plan) -> Plan:
    """Return the plan with the ratio that each microbatch needs; the ratios that it had are not looked at."""
    microbatches = tuple(replace(each, offload=_needed_ratio(plan, each)) for each in plan.microbatches)
    return replace(plan, microbatches=microbatches)


def _needed_ratio(plan: Plan, microbatch: Microbatch) -> float:
    """Find the least o with held x `kept_ratio(o, L)` <= capacity + tokens allowed for rounding, on every rank."""
    if len(microbatch.pieces) == 1:
        only = microbatch.pieces[0]
        if sum(plan.tokens[i] for i in only.sequences) <= plan.capacity:
            return 0.0
    held, rounding = held_by_rank(plan, microbatch)
    kept = min(1.0, *((plan.capacity + rounding[rank]) / tokens for rank, tokens in held.items() if tokens))
    if kept == 1.0:
        return 0.0
    ratio = (1 - kept) * plan.layers / max(plan.layers - 2, 1)
    assert ratio <= 1 + 1e-12, f"{held.most_common(1)} tokens on a rank, with all offloaded ratio {ratio}"
    return min(1.0, math.ceil(ratio * 10**_DIGITS) / 10**_DIGITS)
