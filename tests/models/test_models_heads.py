"""Whole models under plans that split heads: loss and every gradient are those of plain Hugging Face."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing import (
    SIZES,
    CountingStore,
    make_batch,
    random_plan,
)
from transformers import Qwen3Config

from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, shape_from_config
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.program import check_plan, refuse_unsupported
from models.test_models_checkpointing import recomputing, same_bits
from models.test_models_parity import (
    BATCH,
    CONFIGS,
    LENGTHS,
    check_parity,
    run_plain,
    run_planned,
)
from properties import costliest
from tiers import some

MANY_HEADS = 120  # divided by 1 to 6 and by 8
# For `built` and `run_plain`; the tests over all families were made before.
CONFIGS["qwen3 of 120 heads"] = Qwen3Config(
    **{**SIZES, "num_attention_heads": MANY_HEADS, "num_key_value_heads": 4, "head_dim": 2}
)
DEEP = "qwen3 of three layers"
CONFIGS[DEEP] = Qwen3Config(
    **{**SIZES, "num_attention_heads": MANY_HEADS, "num_key_value_heads": 4, "head_dim": 2, "num_hidden_layers": 3}
)


@costliest
@given(choose=st.randoms(use_true_random=False), ranks=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_any_plan_with_split_heads_equals_plain_hugging_face_and_keeps_its_bits_when_recomputed(choose, ranks):
    """Plans of outside tools: several pieces a microbatch, any ranks in any order, shares, ranks without tokens."""
    plan = random_plan(choose, ranks, LENGTHS, layers=2, num_heads=MANY_HEADS)
    kept = run_planned("qwen3 of 120 heads", plan, BATCH, "fp64")
    check_parity(kept, run_plain("qwen3 of 120 heads", BATCH, "fp64"), "fp64")
    plan = recomputing(plan, *(choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches))
    assert same_bits(run_planned("qwen3 of 120 heads", plan, BATCH, "fp64"), kept)


@pytest.mark.parametrize("ranks", some([2, 4], 0))
def test_plans_that_the_planner_makes_with_every_choice_auto_are_run(ranks):
    """Heads, offload and the kind of recomputation together, over sequences that fit by offload alone."""
    choose, batch = random.Random(ranks), make_batch(LENGTHS, vocab=48, seed=1)
    shape = replace(shape_from_config(CONFIGS[DEEP].to_dict()), kv_heads=MANY_HEADS)
    cost, want, found = all_terms_cost(shape, named_hardware("h100")), run_plain(DEEP, batch, "fp64"), set()
    for _ in range(3):
        capacity = int(0.85 * max(LENGTHS) / ranks) + choose.choice((0, 1, 2))
        options = PlanOptions(layers=3, heads="auto", offload="auto", recompute=choose.choice(RECOMPUTE_KINDS))
        plan = plan_step(LENGTHS, Cluster(ranks=ranks, capacity_tokens=capacity), cost, options)
        check_plan(plan)
        refuse_unsupported(plan, num_heads=MANY_HEADS)
        found |= {(p.heads > 1, m.offload > 0) for m in plan.microbatches for p in m.pieces}
        check_parity(run_planned(DEEP, plan, batch, "fp64", make_store=CountingStore), want, "fp64")
    assert (True, True) in found
