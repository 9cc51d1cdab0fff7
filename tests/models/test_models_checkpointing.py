"""Layers that backward computes again: the same bits, the same rings in the plan's order, and what they keep."""

import copy
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing import LiveBytes
from testing.families import build_pair, family_difference, tiny_model
from testing.laid import whole_parameters
from testing.order import check_order
from testing.plans import make_plan, random_plan
from testing.recording import RecordingTransport
from testing.sequences import make_batch
from testing.steps import run_step
from testing.tiny import tiny_family_config
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import ActivationPolicy, PlannedAttention, choose_kernel
from lengthwise.comm import SoloTransport
from lengthwise.core.errors import ModelRefused
from lengthwise.core.plan import RECOMPUTE_KINDS, Piece
from lengthwise.models import apply_policy, check_recompute, model_loss
from lengthwise.models.model_source import build_skeleton
from lengthwise.program import far_peers, lower_plan
from properties import costliest
from tiers import some

AGAIN = ("layer", "all_but_attention", "elementwise")
MIXES = ("elementwise+1/2", "none+1/2")  # of two layers, the first has the stronger kind
LENGTHS = (1, 57, 2, 3, 40, 1, 5, 7, 31, 11, 13, 8)
RINGS = make_plan(
    3,
    LENGTHS,
    [
        Piece(ranks=(0, 2, 1), sequences=(1, 0)),
        [Piece(ranks=(0, 1), sequences=(4,)), Piece(ranks=(2,), sequences=(2, 3, 9))],
        [Piece(ranks=(1, 2), sequences=(8, 5)), Piece(ranks=(0,), sequences=(10, 6, 7, 11))],
    ],
    layers=2,
)
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
BATCH = make_batch(LENGTHS, vocab=48, seed=1, masked=0.2)
MANY_HEADS = 120  # divided by 1 to 6 and by 8
DEEP = {"num_attention_heads": MANY_HEADS, "num_key_value_heads": 4, "head_dim": 2, "num_hidden_layers": 3}
DEEP |= {"layer_types": None}


@cache
def pair_of(family, deep=False):
    return build_pair(family, tiny_family_config(family, DEEP if deep else {}))


def recomputing(plan, *kinds):
    """Give the microbatches these kinds, over and over."""
    return replace(
        plan, microbatches=tuple(replace(m, recompute=kinds[i % len(kinds)]) for i, m in enumerate(plan.microbatches))
    )


def step_of_one(model, kind):
    plan = recomputing(make_plan(1, (6,), [Piece(ranks=(0,), sequences=(0,))], layers=2), kind)
    return run_step(model, plan, make_batch((6,), vocab=48), precision="fp32")


def test_family_without_hugging_faces_wrap_is_refused_by_name():
    model = build_skeleton(tiny_family_config("ctrl"))
    check_recompute(model, "none")
    for kind in AGAIN:
        with pytest.raises(ModelRefused, match=f"{kind} with ctrl"):
            check_recompute(model, kind)


@pytest.mark.parametrize(("family", "plan"), [("gemma3_text", RINGS), ("mixtral", SPLIT)], ids=["rings", "split heads"])
@pytest.mark.parametrize("kinds", [RECOMPUTE_KINDS, ("elementwise", *MIXES)], ids=["kinds", "mixes"])
def test_recomputing_changes_no_bit(family, plan, kinds):
    kept, again = (
        run_step(pair_of(family)["planned"], recomputing(plan, *each), BATCH, precision="fp32")
        for each in (("none",), kinds)
    )
    assert again.has_bits_of(kept)


@pytest.mark.parametrize(
    ("family", "split", "kind"),
    [("llama", True, "layer"), *some([("gemma3_text", False, kind) for kind in RECOMPUTE_KINDS], 1)],
)
def test_messages_are_those_that_the_order_check_counts(family, split, kind):
    """Rings run again under `layer` and in no other case, in the order that `check_order` proves free of deadlock."""
    model, recorded = pair_of(family)["planned"], {}
    windows = [None, None] if split else [{"sliding_attention": 6}.get(each) for each in model.config.layer_types]
    plan = recomputing(SPLIT if split else RINGS, kind)

    def around(transport):
        return recorded.setdefault(transport.rank, RecordingTransport(transport))

    run_step(model, plan, BATCH, around=around)
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


def live_bytes(kind, *, layers=2, **changes):
    """Return the bytes that wait for backward after a forward of a small model in fp32."""
    model = tiny_model("llama", {"num_hidden_layers": layers, **changes}).train()
    batch, transport = make_batch([200], vocab=48), SoloTransport()
    flat = whole_parameters(model, transport, dtype=torch.float32)
    (program,) = lower_plan(make_plan(1, [200], [Piece(ranks=(0,), sequences=(0,))]), 0)
    tensors = batch.tensors(program.segments(0))
    attention = PlannedAttention(program, transport, choose_kernel(torch.device("cpu")))
    with LiveBytes(flat.values, flat.grads, *tensors) as live:
        with apply_policy(model, attention, ActivationPolicy(recompute=kind)):
            loss = model_loss(model, attention, *tensors)
        waiting = live.now_bytes
        loss.backward()
        assert live.now_bytes <= 8, "nothing but the loss outlives its backward"
    return waiting


def test_recomputing_keeps_what_it_says_and_no_more():
    """hidden 32, 4 heads of 8, fp32: a token and layer keeps its input, and what attention gave where that is kept."""
    tokens, hidden, heads, config = 200, 32 * 4, 4, tiny_family_config("llama")
    products = 2 * hidden + 2 * config.num_key_value_heads * 8 * 4 + 2 * config.intermediate_size * 4  # q, o; k, v; MLP
    kept, *again = (live_bytes(kind) for kind in ("none", *AGAIN))
    assert [live_bytes(kind, layers=3) - of_two for kind, of_two in zip(AGAIN, again, strict=True)] == [
        tokens * hidden,
        tokens * (hidden + hidden + heads * 4),
        tokens * (hidden + hidden + heads * 4 + products),
    ]
    assert live_bytes("none", layers=3) - kept > 10 * tokens * hidden
    mixed = [2 * live_bytes(mix) for mix in MIXES]
    assert mixed == [again[2] + again[1], kept + again[2]]


class Products(TorchDispatchMode):
    """Counts products of matrices, with and without a bias."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_no_product_runs_twice_where_elementwise_operations_alone_are_computed_again():
    """In a mix those of the layers with the stronger kind do."""
    counted = []
    for kind in ("none", "elementwise", "none+1/2", "elementwise+1/2", "all_but_attention"):
        with Products() as products:
            live_bytes(kind, attention_bias=True)
        counted.append(products.calls)
    assert counted[4] > counted[2] == counted[1] == counted[0] > 0
    assert 2 * (counted[3] - counted[0]) == counted[4] - counted[0]


def test_a_layer_outside_of_hugging_faces_wrap_is_refused():
    """It would be kept without a word, and its ring not run again where the order check counts on it."""

    class Plain(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = [layer]  # not a submodule: what `modules()` does not find is not switched on

        def forward(self, *arguments, **keywords):
            return self.layer[0](*arguments, **keywords)

    model = copy.deepcopy(pair_of("llama")["planned"])
    model.model.layers[1] = Plain(model.model.layers[1])
    with pytest.raises(ModelRefused, match=r"all 2 layers that mix tokens .* got 1 layer\."):
        step_of_one(model, "layer")


def test_a_model_that_writes_over_its_attention_is_found():
    model = copy.deepcopy(pair_of("llama")["planned"])
    layer = model.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda _, given: given[0].mul_(1.0))
    with pytest.raises(AssertionError, match="overwrote"):
        step_of_one(model, "elementwise")


def test_a_product_that_the_model_writes_over_is_kept_as_it_was():
    model = copy.deepcopy(pair_of("llama")["planned"])
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda _module, _given, out: out.add_(1.0))
    scale = model.model.layers[1].input_layernorm.weight[0]  # autograd saves both factors before it writes
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda _module, _given, out: out.mul_(scale))
    assert step_of_one(model, "elementwise").has_bits_of(step_of_one(model, "none"))


@pytest.mark.exhaustive
@costliest
@given(choose=st.randoms(use_true_random=False), ranks=st.sampled_from([2, 3, 4, 5, 6, 8]))
def test_any_plan_with_split_heads_equals_plain_hugging_face_and_keeps_its_bits_when_recomputed(choose, ranks):
    """Plans of outside tools: several pieces a microbatch, any ranks in any order, shares, ranks without tokens."""
    pair, plan = pair_of("qwen3", deep=True), random_plan(choose, ranks, LENGTHS, layers=3, num_heads=MANY_HEADS)
    found = family_difference(pair, plan, LENGTHS, precision="fp64")
    assert max(found.loss, found.gradient) <= 1e-12
    kinds = (*RECOMPUTE_KINDS, "none+1/3", "elementwise+2/3")
    again = recomputing(plan, *(choose.choice(kinds) for _ in plan.microbatches))
    assert run_step(pair["planned"], again, BATCH).has_bits_of(run_step(pair["planned"], plan, BATCH))
