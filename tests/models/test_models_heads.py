"""Whole models under plans that split heads: loss and every gradient are those of plain Hugging Face."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import (
    CountingStore,
    RecordingTransport,
    build_pair,
    family_difference,
    make_batch,
    make_plan,
    random_plan,
    run_ranks,
    tiny_family_config,
)
from testing.order import check_order
from testing.strict import StrictWorld
from transformers import Qwen3Config

from lengthwise.attention import FlashCpuKernel
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, shape_from_config
from lengthwise.engine.activations import Offloading
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import FAMILIES, keep_double
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.program import check_plan, head_peers, lower_plan, refuse_unsupported
from models.test_models_checkpointing import recomputing, same_bits
from models.test_models_parity import (
    BATCH,
    CONFIGS,
    LENGTHS,
    SIZES,
    built,
    check_parity,
    run_plain,
    run_planned,
    run_rank,
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
LATENT = [name for name in FAMILIES if "deepseek" in name or name in ("minicpm3", "glm4_moe_lite", "longcat_flash")]
# Splits of two kinds over four ranks, one of more ranks than there are heads of keys, rings and packs beside them.
MIXED = make_plan(
    4,
    LENGTHS,
    [
        [Piece(ranks=(2, 3, 0, 1), sequences=(1, 0, 5), heads=2), Piece(ranks=(1,), sequences=(2, 6))],
        [Piece(ranks=(3, 2, 1, 0), sequences=(4, 7), heads=4), Piece(ranks=(0, 1), sequences=(8,), heads=2)],
        [Piece(ranks=(0, 2, 1), sequences=(3, 9)), Piece(ranks=(3, 1), sequences=(10, 11), heads=2, shares=(1, 3))],
    ],
    layers=2,
)


@pytest.mark.parametrize("precision", some(["fp64", "fp32"], 0))
@pytest.mark.parametrize(
    "family", some([name for name in CONFIGS if name not in (DEEP, "qwen3 of 120 heads")], 0, 4, 8)
)
def test_family_with_split_heads_equals_plain_hugging_face(family, precision):
    want = run_plain(family, BATCH, precision)
    check_parity(run_planned(family, MIXED, BATCH, precision), want, precision)


@pytest.mark.parametrize("family", some(["llama", "gpt-oss", "gemma3", "qwen3-moe"], 1))
def test_recomputing_split_heads_equals_plain_hugging_face(family):
    want = run_plain(family, BATCH, "fp64")
    for kinds in (("layer", "all_but_attention", "none"), ("all_but_attention", "layer", "layer")):
        check_parity(run_planned(family, recomputing(MIXED, *kinds), BATCH, "fp64"), want, "fp64")


@pytest.mark.parametrize("family", some(["llama", "gpt-oss", "mixtral"], 2))
@pytest.mark.parametrize("precision", some(["fp32", "bf16"], 1))
def test_recomputing_split_heads_changes_no_bit(family, precision):
    kept = run_planned(family, MIXED, BATCH, precision)
    for kind in RECOMPUTE_KINDS[1:]:
        assert same_bits(run_planned(family, recomputing(MIXED, kind), BATCH, precision), kept)


@pytest.mark.parametrize("ranks", some([1, 2, 3, 4, 5, 6, 8], 4))
def test_every_split_of_every_degree_equals_plain_hugging_face(ranks):
    family = "qwen3 of 120 heads"
    want = run_plain(family, BATCH, "fp64")
    for heads in (u for u in range(1, ranks + 1) if ranks % u == 0):
        ring = Piece(ranks=tuple(range(ranks)), sequences=(1, 0, 3, 4, 8), heads=heads)
        packs = Piece(ranks=(ranks - 1,), sequences=(2, 5, 6, 7, 9, 10, 11))
        plan = make_plan(ranks, LENGTHS, [[packs, ring]], layers=2)
        check_parity(run_planned(family, plan, BATCH, "fp64"), want, "fp64")


@pytest.mark.parametrize("model_type", some(LATENT, 0))
def test_latent_attention_with_split_heads_equals_plain_hugging_face(model_type):
    """Keys wider than values, and as many of their heads as of queries."""
    config = tiny_family_config(model_type)
    pair = build_pair(model_type, config)
    found = family_difference(pair, recomputing(MIXED, "none", "layer"), LENGTHS, precision="fp64")
    assert found.loss <= 1e-13
    assert found.gradient <= 1e-12


@costliest
@given(choose=st.randoms(use_true_random=False), ranks=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_any_plan_with_split_heads_equals_plain_hugging_face(choose, ranks):
    plan = random_plan(choose, ranks, LENGTHS, layers=2, num_heads=MANY_HEADS)
    plan = recomputing(plan, *(choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches))
    want = run_plain("qwen3 of 120 heads", BATCH, "fp64")
    check_parity(run_planned("qwen3 of 120 heads", plan, BATCH, "fp64"), want, "fp64")


def run_offloading(plan):
    """Return (loss, gradients), and the bytes that left, on counting stores."""
    built(DEEP)
    kernel = FlashCpuKernel()
    batch, stores = make_batch(LENGTHS, vocab=48, seed=1), [CountingStore() for _ in range(plan.ranks)]

    def work(transport):
        model = copy.deepcopy(built(DEEP))
        flat = FlatParameters(model, transport, dtype=torch.float64)
        with keep_double(torch.float64):
            offloading = Offloading(model, kernel, stores[transport.rank])
            done = run_plan(model, plan, batch, transport, kernel, name="test", offloading=offloading)
        loss = torch.tensor([done.loss_sum], dtype=torch.float64)
        transport.all_reduce(loss)
        flat.reduce_gradients()
        return loss.item() / batch.loss_tokens, flat.gather_gradients()

    return StrictWorld(plan.ranks).run(work)[0], sum(store.put_bytes for store in stores)


@pytest.mark.parametrize("ranks", some([1, 2, 3, 5, 8], 2))
def test_split_heads_recomputed_and_offloaded_together_equal_plain_hugging_face(ranks):
    choose, left = random.Random(ranks), 0
    want = run_plain(DEEP, make_batch(LENGTHS, vocab=48, seed=1), "fp64")
    for kinds in (("none", "layer"), ("all_but_attention", "none")):
        plan = recomputing(random_plan(choose, ranks, LENGTHS, layers=3, num_heads=MANY_HEADS), *kinds)
        found, nothing = run_offloading(plan)
        assert nothing == 0
        check_parity(found, want, "fp64")
        away = tuple(replace(m, offload=choose.choice((0.3, 0.7, 1.0))) for m in plan.microbatches)
        offloaded, put_bytes = run_offloading(replace(plan, microbatches=away))
        assert same_bits(offloaded, found)
        left += put_bytes
    assert left


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
        check_parity(run_offloading(plan)[0], want, "fp64")
    assert (True, True) in found


@pytest.mark.parametrize("family", some(["llama", "gemma3"], 1))
@pytest.mark.parametrize("kind", RECOMPUTE_KINDS)
def test_messages_are_those_that_the_order_check_counts(family, kind):
    windows = [6, None] if family == "gemma3" else [None, None]
    plan, recorded = recomputing(MIXED, kind), {}
    built(family)

    def work(transport):
        recorded[transport.rank] = RecordingTransport(transport)
        return run_rank(recorded[transport.rank], family, plan, BATCH, "fp64")

    StrictWorld(4).run(work)
    sent = sum(len(call.sends) for each in recorded.values() for call in each.calls)
    met = sum(len(head_peers(lower_plan(plan, rank), rank)) for rank in range(4))
    assert sent + met == check_order(plan, windows=windows)
    assert met == 2  # ranks 0 and 3


def test_split_heads_run_on_processes():
    want = run_plain("llama", BATCH, "fp64")
    check_parity(run_ranks(lambda t: run_rank(t, "llama", MIXED, BATCH, "fp64"), 4)[0], want, "fp64")
