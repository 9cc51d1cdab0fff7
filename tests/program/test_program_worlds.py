"""All ranks of a planned step run their programs in symbols: every message has its other side, in the same order."""

import resource
import time
from dataclasses import replace
from multiprocessing import get_context

import pytest
from testing.worlds import Posted, check_world, run_symbolically

from lengthwise.core.plan import Plan
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, named_shape, sharded_cost, step_memory
from lengthwise.data.recipes import draw_lengths
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.program import check_plan

SHAPE, H100 = named_shape("llama-3.1-8b"), named_hardware("h100")


def planned(ranks: int, tokens_a_rank: int, capacity: int, heads: str) -> Plan:
    cluster = Cluster(ranks=ranks, capacity_tokens=capacity)
    tokens = draw_lengths("byted", tokens_a_rank * ranks, 0, longest_tokens=int(0.98 * cluster.longest_tokens))
    memory = replace(step_memory(SHAPE, H100, ranks), shard="zero3")
    options = PlanOptions(mode="waves", layers=SHAPE.layers, heads=heads, planning_share=0.1)
    plan = plan_step(tokens, cluster, sharded_cost(all_terms_cost(SHAPE, H100), memory), options)
    check_plan(plan)
    return plan


def test_every_message_of_96_ranks_has_its_other_side() -> None:
    plan = planned(96, 8192, 4096, "auto")
    posted = run_symbolically(plan, range(plan.ranks), layers=SHAPE.layers)
    check_world(posted, plan)
    assert len(plan.microbatches) > 1
    assert max(piece.heads for each in plan.microbatches for piece in each.pieces) > 1
    assert posted.messages > plan.ranks


@pytest.mark.exhaustive
def test_every_message_of_12288_ranks_has_its_other_side() -> None:
    """384M tokens: each of 12,288 ranks runs one step, on two cores in under five minutes, the plan included.

    Counted in seconds of the processors, whatever else the machine does.
    """
    plan = planned(12_288, 32_768, 16_384, "off")
    made = time.process_time()
    with get_context("fork").Pool(2) as pool:
        posted = Posted()
        for each in pool.starmap(run_symbolically, [(plan, range(half, plan.ranks, 2)) for half in (0, 1)]):
            posted.add(each)
        pool.close()
        pool.join()
    check_world(posted, plan)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    took, waves = time.process_time() + (children.ru_utime + children.ru_stime) / 2, len(plan.microbatches)
    print(f"{waves} waves, {posted.messages:,} messages a layer, plan {made:.0f} s, in all {took:.0f} s")
    assert took < 300
