"""Layers that backward computes again: the same bits, the same rings in the plan's order, and less memory."""

import copy
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import (
    SIZES,
    CountingStore,
    LiveBytes,
    RecordingTransport,
    make_batch,
    make_plan,
    random_plan,
    tiny_family_config,
)
from testing.laid import whole_parameters
from testing.order import check_order
from transformers import Qwen3Config

from lengthwise.attention import ActivationPolicy, PlannedAttention, choose_kernel
from lengthwise.comm import Mesh, SoloTransport
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.core.shape import Cluster
from lengthwise.cost import all_terms_cost, named_hardware, shape_from_config
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import apply_policy, check_recompute, model_loss
from lengthwise.models.model_source import build_skeleton
from lengthwise.planner import PlanOptions, plan_step
from lengthwise.program import check_plan, far_peers, lower_plan, refuse_unsupported
from models.test_models_parity import (
    BATCH,
    CONFIGS,
    LENGTHS,
    built,
    check_parity,
    planned,
    run_plain,
    run_planned,
)
from properties import costliest
from tiers import more

AGAIN = ("layer", "all_but_attention")
CPU = torch.device("cpu")


def recomputing(plan, *kinds):
    """Give the microbatches these kinds, over and over."""
    return replace(
        plan, microbatches=tuple(replace(m, recompute=kinds[i % len(kinds)]) for i, m in enumerate(plan.microbatches))
    )


def same_bits(got, want):
    return got[0] == want[0] and all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def test_family_without_hugging_faces_wrap_is_refused_by_name():
    model = build_skeleton(tiny_family_config("ctrl"))
    check_recompute(model, "none")
    for kind in AGAIN:
        with pytest.raises(ModelRefused, match=f"{kind} with ctrl"):
            check_recompute(model, kind)


# Splits of two kinds over four ranks, one of more ranks than there are heads of keys, rings and packs beside them.
SPLIT = make_plan(
    4,
    LENGTHS,
    [
        [Piece(ranks=(2, 3, 0, 1), sequences=(1, 0, 5), heads=2), Piece(ranks=(1,), sequences=(2, 6))],
        [Piece(ranks=(3, 2, 1, 0), sequences=(4, 7), heads=4), Piece(ranks=(0, 1), sequences=(8,), heads=2)],
        [Piece(ranks=(0, 2, 1), sequences=(3, 9)), Piece(ranks=(3, 1), sequences=(10, 11), heads=2, shares=(1, 3))],
    ],
    layers=2,
)


@pytest.mark.parametrize(
    ("family", "split"), [("gemma3", False), ("mixtral", True), more("llama", True), more("gpt-oss", False)]
)
def test_recomputing_changes_no_bit(family, split):
    batch, plan = make_batch(LENGTHS, vocab=48, seed=1), SPLIT if split else planned(3)
    mixed = recomputing(plan, *RECOMPUTE_KINDS)  # each kind over rings and over packs
    assert split or {(m.recompute, p.degree > 1) for m in mixed.microbatches for p in m.pieces} >= {
        (kind, is_ring) for kind in AGAIN for is_ring in (False, True)
    }
    kept = run_planned(family, plan, batch, "bf16")
    assert same_bits(run_planned(family, mixed, batch, "bf16"), kept)


@pytest.mark.parametrize(("family", "split"), [("gemma3", False), ("llama", True), more("gemma3", True)])
@pytest.mark.parametrize("kind", RECOMPUTE_KINDS)
def test_messages_are_those_that_the_order_check_counts(family, split, kind):
    """Rings run again under `layer` and in no other case, in the order that `check_order` proves free of deadlock."""
    windows = [6, None] if family == "gemma3" else [None, None]
    plan = recomputing(SPLIT if split else planned(3), kind)
    recorded = {}

    def around(transport):
        return recorded.setdefault(transport.rank, RecordingTransport(transport))

    run_planned(family, plan, BATCH, "fp64", around=around)
    sent = sum(len(call.sends) for each in recorded.values() for call in each.calls)
    met = sum(len(far_peers(lower_plan(plan, rank), rank)) for rank in range(plan.ranks))
    assert met == 2 * split  # ranks 0 and 3
    assert sent + met == check_order(plan, windows=windows) > 0
    if split:
        return
    phases = Counter()
    for call in (call for each in recorded.values() for call in each.calls):
        phases[call.phase.split()[-1]] += len(call.sends)
    kept = check_order(recomputing(plan, "none"), windows=windows)
    assert phases["backward"] == kept + phases["forward"] * ((kind == "layer") - 1)


def live_bytes(kind, *, layers=2, num_tokens=200):
    """(bytes that wait for backward, peak) of one pass of a small model in fp32."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers = layers
    model = type(built("llama"))._from_config(config, attn_implementation="lengthwise").train()
    batch, transport = make_batch([num_tokens], vocab=48), SoloTransport()
    flat = whole_parameters(model, transport, dtype=torch.float32)
    (program,) = lower_plan(make_plan(1, [num_tokens], [Piece(ranks=(0,), sequences=(0,))]), 0)
    tensors = batch.tensors(program.segments(0))
    attention = PlannedAttention(program, transport, choose_kernel(CPU))
    with LiveBytes(flat.values, flat.grads, *tensors) as live:
        with apply_policy(model, attention, ActivationPolicy(recompute=kind)):
            loss = model_loss(model, attention, *tensors)
        waiting = live.now_bytes
        loss.backward()
        assert live.now_bytes <= 8, "nothing but the loss outlives its backward"
    return waiting, live.peak_bytes


def test_recomputing_keeps_what_it_says_and_no_more():
    """hidden 32, 4 heads of 8, fp32: a token and layer keeps its input, and what attention gave where that is kept."""
    tokens, hidden, heads = 200, 32 * 4, 4
    kept, *again = (live_bytes(kind)[0] for kind in ("none", *AGAIN))
    assert [live_bytes(kind, layers=3)[0] - of_two for kind, of_two in zip(AGAIN, again, strict=True)] == [
        tokens * hidden,
        tokens * (hidden + hidden + heads * 4),
    ]
    assert live_bytes("none", layers=3)[0] - kept > 10 * tokens * hidden


def test_recomputing_lowers_the_peak_of_a_deep_model():
    kept, layer, attention = (live_bytes(kind, layers=8)[1] for kind in ("none", *AGAIN))
    assert layer < attention < kept / 3


def test_evaluation_recomputes_nothing():
    batch, plan = make_batch((6, 12), vocab=48), make_plan(1, (6, 12), [Piece(ranks=(0,), sequences=(0, 1))])
    model = copy.deepcopy(built("llama"))
    runs = {}
    for kind in RECOMPUTE_KINDS:
        context = StepContext(model, Mesh(SoloTransport(), 1), choose_kernel(CPU), name="e", train=False)
        work = run_part(recomputing(plan, kind), batch, context)
        runs[kind] = work.loss_sum
    assert len(set(runs.values())) == 1
    assert not any(module.gradient_checkpointing for module in model.model.layers)


def test_a_layer_outside_of_hugging_faces_wrap_is_refused():
    """It would be kept without a word, and its ring not run again where the order check counts on it."""

    class Plain(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = [layer]  # not a submodule: what `modules()` does not find is not switched on

        def forward(self, *arguments, **keywords):
            return self.layer[0](*arguments, **keywords)

    model = copy.deepcopy(built("llama"))
    model.model.layers[1] = Plain(model.model.layers[1])
    batch, plan = make_batch((6,), vocab=48), make_plan(1, (6,), [Piece(ranks=(0,), sequences=(0,))])
    context = StepContext(model, Mesh(SoloTransport(), 1), choose_kernel(CPU), name="test")
    with pytest.raises(ModelRefused, match=r"all 2 layers that mix tokens .* got 1 layer\."):
        run_part(recomputing(plan, "layer"), batch, context)


def test_a_model_that_writes_over_its_attention_is_found():
    model = copy.deepcopy(built("llama"))
    layer = model.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda _, given: given[0].mul_(1.0))
    batch, plan = make_batch((6,), vocab=48), make_plan(1, (6,), [Piece(ranks=(0,), sequences=(0,))])
    context = StepContext(model, Mesh(SoloTransport(), 1), choose_kernel(CPU), name="test")
    with pytest.raises(AssertionError, match="overwrote"):
        run_part(recomputing(plan, "all_but_attention"), batch, context)


DEEP, MANY_HEADS = "qwen3 of 120 heads", 120  # divided by 1 to 6 and by 8
HEADS = {"num_attention_heads": MANY_HEADS, "num_key_value_heads": 4, "head_dim": 2, "num_hidden_layers": 3}
CONFIGS[DEEP] = Qwen3Config(**{**SIZES, **HEADS})  # for `built` and `run_plain`


@costliest
@given(choose=st.randoms(use_true_random=False), ranks=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_any_plan_with_split_heads_equals_plain_hugging_face_and_keeps_its_bits_when_recomputed(choose, ranks):
    """Plans of outside tools: several pieces a microbatch, any ranks in any order, shares, ranks without tokens."""
    plan = random_plan(choose, ranks, LENGTHS, layers=3, num_heads=MANY_HEADS)
    kept = run_planned(DEEP, plan, BATCH, "fp64")
    check_parity(kept, run_plain(DEEP, BATCH, "fp64"), "fp64")
    plan = recomputing(plan, *(choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches))
    assert same_bits(run_planned(DEEP, plan, BATCH, "fp64"), kept)


@pytest.mark.parametrize("ranks", [2, more(4)])
def test_plans_that_the_planner_makes_with_every_choice_auto_are_run(ranks):
    """Heads, offload and the kind of recomputation together, over sequences that fit by offload alone."""
    choose = random.Random(ranks)
    shape = replace(shape_from_config(CONFIGS[DEEP].to_dict()), kv_heads=MANY_HEADS)
    cost, want, found = all_terms_cost(shape, named_hardware("h100")), run_plain(DEEP, BATCH, "fp64"), set()
    for _ in range(2):
        capacity = int(0.85 * max(LENGTHS) / ranks) + choose.choice((0, 1, 2))
        options = PlanOptions(layers=3, heads="auto", offload="auto", recompute=choose.choice(RECOMPUTE_KINDS))
        plan = plan_step(LENGTHS, Cluster(ranks=ranks, capacity_tokens=capacity), cost, options)
        check_plan(plan)
        refuse_unsupported(plan, num_heads=MANY_HEADS)
        found |= {(p.heads > 1, m.offload > 0) for m in plan.microbatches for p in m.pieces}
        check_parity(run_planned(DEEP, plan, BATCH, "fp64", make_store=CountingStore), want, "fp64")
    assert (True, True) in found
