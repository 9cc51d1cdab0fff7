"""Layers that backward computes again: the same bits, the same rings in the plan's order, and less memory."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import (
    LiveBytes,
    RecordingTransport,
    build_pair,
    draw_lengths,
    make_batch,
    make_plan,
    random_plan,
    run_ranks,
    tiny_family_config,
)
from testing.order import check_order
from testing.strict import StrictWorld

from lengthwise.attention import ActivationPolicy, PlannedAttention, choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.engine.replicated import FlatParameters
from lengthwise.engine.step import run_plan
from lengthwise.models import apply_policy, check_recompute, model_loss
from lengthwise.program import lower_plan
from models.test_models_parity import (
    CONFIGS,
    LENGTHS,
    built,
    check_parity,
    planned,
    run_plain,
    run_planned,
    run_rank,
)
from properties import costly
from tiers import some

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
    config = tiny_family_config("ctrl")
    check_recompute(config, "none")
    for kind in AGAIN:
        with pytest.raises(ModelRefused, match=f"{kind} with ctrl"):
            check_recompute(config, kind)


@pytest.mark.parametrize("precision", some(["fp64", "fp32", "bf16"], 2))
@pytest.mark.parametrize("family", some(["llama", "gpt-oss", "mixtral", "gemma3"], 1))
def test_recomputing_changes_no_bit(family, precision):
    batch, plan = make_batch(LENGTHS, vocab=48, seed=1), planned(3)
    mixed = recomputing(plan, *RECOMPUTE_KINDS)  # each kind over rings and over packs
    assert {(m.recompute, p.degree > 1) for m in mixed.microbatches for p in m.pieces} >= {
        (kind, is_ring) for kind in AGAIN for is_ring in (False, True)
    }
    kept = run_planned(family, plan, batch, precision)
    for again in (recomputing(plan, "layer"), recomputing(plan, "all_but_attention"), mixed):
        assert same_bits(run_planned(family, again, batch, precision), kept)


@pytest.mark.parametrize("kind", AGAIN)
def test_recomputing_changes_no_bit_of_a_router_balance_loss(kind):
    """The routers' logits leave a checkpointed layer on the side, and their gradients come back into it there."""
    config = copy.deepcopy(CONFIGS["mixtral"])
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    model = build_pair("mixtral", config)["planned"]
    batch, plan = make_batch(LENGTHS, vocab=48, seed=1), planned(3)

    def work(transport, plan):
        mine = copy.deepcopy(model)
        flat = FlatParameters(mine, transport, dtype=torch.float32)
        done = run_plan(mine, plan, batch, transport, choose_kernel(CPU), name="test")
        flat.reduce_gradients()
        return done.router_loss, flat.gather_gradients()

    kept, got = (StrictWorld(3).run(lambda t, plan=plan: work(t, plan))[0] for plan in (plan, recomputing(plan, kind)))
    assert kept[0] > 0
    assert same_bits(got, kept)


@costly
@given(choose=st.randoms(use_true_random=False), ranks=st.sampled_from([1, 2, 3, 5]), count=st.integers(1, 6))
def test_any_plan_with_any_recomputation_gives_the_same_bits(choose, ranks, count):
    lengths = [*draw_lengths(choose, ranks, count), 3]  # one sequence at least has a loss
    plan = random_plan(choose, ranks, lengths, layers=2)
    kinds = [choose.choice(RECOMPUTE_KINDS) for _ in plan.microbatches]
    batch = make_batch(lengths, vocab=48)
    kept, got = (run_planned("qwen3", each, batch, "fp32") for each in (plan, recomputing(plan, *kinds)))
    assert same_bits(got, kept), kinds


def test_a_plan_of_mixed_kinds_runs_on_processes():
    choose = random.Random(3)
    lengths = [57, 1, 40, 13, 2, 31, 8]
    plan = recomputing(random_plan(choose, 3, lengths, layers=2), *RECOMPUTE_KINDS)
    assert {m.recompute for m in plan.microbatches if any(p.degree > 1 for p in m.pieces)} > {"layer"}
    batch = make_batch(lengths, vocab=48, seed=1, masked=0.2)
    want = run_plain("llama", batch, "fp64")
    check_parity(run_ranks(lambda t: run_rank(t, "llama", plan, batch, "fp64"), 3)[0], want, "fp64")


@pytest.mark.parametrize("family", some(["llama", "gemma3"], 1))
@pytest.mark.parametrize("kind", RECOMPUTE_KINDS)
def test_messages_are_those_that_the_order_check_counts(family, kind):
    """Rings run again under `layer` and in no other case, in the order that `check_order` proves free of deadlock."""
    windows = [6, None] if family == "gemma3" else [None, None]
    plan = recomputing(planned(3), kind)
    batch = make_batch(LENGTHS, vocab=48)
    built(family)
    recorded = {}

    def work(transport):
        recorded[transport.rank] = RecordingTransport(transport)
        return run_rank(recorded[transport.rank], family, plan, batch, "fp64")

    StrictWorld(3).run(work)
    sent = sum(len(call.sends) for each in recorded.values() for call in each.calls)
    assert sent == check_order(plan, windows=windows) > 0
    backward = [call for each in recorded.values() for call in each.calls if call.phase.endswith("backward")]
    forward = [call for each in recorded.values() for call in each.calls if call.phase.endswith("forward")]
    kept = check_order(recomputing(plan, "none"), windows=windows)
    again = sum(len(call.sends) for call in forward)
    assert sum(len(call.sends) for call in backward) == kept - again + again * (kind == "layer")


def live_bytes(kind, *, layers=2, num_tokens=200):
    """(bytes that wait for backward, peak) of one pass of a small model in fp32."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers = layers
    model = type(built("llama"))._from_config(config, attn_implementation="lengthwise").train()
    batch, transport = make_batch([num_tokens], vocab=48), SoloTransport()
    flat = FlatParameters(model, transport, dtype=torch.float32)
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
        work = run_plan(
            model, recomputing(plan, kind), batch, SoloTransport(), choose_kernel(CPU), name="e", train=False
        )
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
    with pytest.raises(ModelRefused, match=r"all 2 attention layers .* got 1 that did"):
        run_plan(model, recomputing(plan, "layer"), batch, SoloTransport(), choose_kernel(CPU), name="test")


def test_a_model_that_writes_over_its_attention_is_found():
    model = copy.deepcopy(built("llama"))
    layer = model.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda _, given: given[0].mul_(1.0))
    batch, plan = make_batch((6,), vocab=48), make_plan(1, (6,), [Piece(ranks=(0,), sequences=(0,))])
    with pytest.raises(AssertionError, match="wrote over"):
        run_plan(model, recomputing(plan, "all_but_attention"), batch, SoloTransport(), choose_kernel(CPU), name="test")
