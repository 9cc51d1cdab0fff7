"""Formulas of a step's memory, capacities and the layout that follow from them. Held to steps in tests/engine."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError, MemoryShortage
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.core.shape import LayerCut, ModelShape
from lengthwise.cost import (
    RESERVED,
    SHAPE_NAMES,
    Choice,
    ModelLayout,
    StepMemory,
    all_terms_cost,
    choose_shard,
    memory_of,
    named_hardware,
    named_shape,
    offloaded_cost,
    ranks_of_node,
    recompute_capacities,
    step_memory,
    wanted_tokens,
)
from lengthwise.cost.capacity import host_share_bytes

LLAMA_7B = named_shape("llama-7b")
FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "")


@st.composite
def memories(draw) -> StepMemory:
    kv_heads, experts, layers = draw(st.integers(1, 8)), draw(st.sampled_from([1, 8])), draw(st.integers(2, 80))
    virtual = draw(st.integers(1, min(3, layers)))
    stages = draw(st.integers(1, min(8, layers // virtual)))  # of at least a layer each
    shape = ModelShape(
        name="drawn", family=draw(st.sampled_from(FAMILIES)), layers=layers,
        hidden=draw(st.integers(16, 8192)), heads=kv_heads * draw(st.integers(1, 8)), kv_heads=kv_heads,
        head_dim=draw(st.integers(8, 256)), intermediate=draw(st.integers(16, 30_000)),
        vocab=draw(st.integers(256, 300_000)), experts=experts, experts_per_token=draw(st.integers(1, experts)),
    )  # fmt: skip
    return StepMemory(
        shape=shape, dtype_bytes=draw(st.sampled_from([2, 4, 8])), trained=draw(st.sampled_from([None, 1000])),
        ranks=draw(st.integers(1, 100)), cut=LayerCut(stages=stages, virtual=virtual),
        logits_at_once=draw(st.sampled_from([None, 1 << 18, 1 << 25])), fused_norms=draw(st.booleans()),
        shard=draw(st.sampled_from(["zero1", "zero3"])),
    )  # fmt: skip


KINDS = st.sampled_from(RECOMPUTE_KINDS)
TOKENS = st.integers(1, 10**7)
RATIOS = st.floats(0, 1)


@given(memories(), KINDS, TOKENS, TOKENS, RATIOS, RATIOS)
def test_bytes_rise_with_tokens_and_fall_with_offload_and_recomputation(memory, kind, tokens, more, one, other) -> None:
    few, many = (memory.peak_bytes(each, Choice(recompute=kind, offload=one)) for each in (tokens, tokens + more))
    assert memory.state_bytes() < few < many
    most, fewer, some, none = (
        memory.peak_bytes(tokens, Choice(recompute=kind, offload=ratio))
        for ratio in (1.0, max(one, other), min(one, other), 0.0)
    )
    assert fewer <= some * (1 + 1e-12)
    assert memory.shape.layers > 2 or most == none  # two layers stay
    kept = [memory.saved_bytes(each) for each in ("none", "elementwise", "all_but_attention", "layer")]
    assert kept[0] >= kept[1] > kept[2] > kept[3]


@given(memories(), KINDS, st.lists(st.tuples(TOKENS, RATIOS), min_size=1, max_size=5))
def test_arrays_are_counted_one_by_one(memory, kind, pairs) -> None:
    tokens, ratios = (np.array(each) for each in zip(*pairs, strict=True))
    expected = [float(memory.microbatch_bytes(n, Choice(recompute=kind, offload=r))) for n, r in pairs]
    together = memory.microbatch_bytes(tokens, Choice(recompute=kind, offload=ratios))
    assert together.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_llama_of_7b_keeps_what_its_operations_save() -> None:
    memory = StepMemory(shape=LLAMA_7B, dtype_bytes=2)
    norms = 2 * (4 + 2 + 2) * 4096  # input in fp32, normed, and times the weight
    layer = norms + 2 * (2 * 4096 + 2 * 1024) + 4 * 32 + 2 * 4 * 11008  # q, result, k, v, log-sum-exp; the MLP
    last = 6 * 4096
    assert memory.saved_bytes("none") == 32 * layer + last
    assert memory.saved_bytes("layer") == 32 * 2 * 4096 + last
    assert memory.saved_bytes("all_but_attention") == 32 * (2 * 2 * 4096 + 4 * 32) + last
    products = 2 * (4096 + 2 * 1024 + 4096 + 2 * 11008)  # q, k, v, out of attention; gate and up
    assert memory.saved_bytes("elementwise") == memory.saved_bytes("all_but_attention") + 32 * products
    # Backward begins with an MLP: all of its layer again, the gradients of its result and of gate and up.
    turn = layer + 2 * (4096 + 2 * 11008)
    found = memory.microbatch_bytes(10**6, Choice(recompute="layer"))
    assert found == 10**6 * (32 * 2 * 4096 + turn - 2 * 4096 + 2 * 4096)
    assert all_terms_cost(LLAMA_7B, named_hardware("h100")).copy_bytes["none"] == memory.saved_bytes("none")


@pytest.mark.parametrize(
    ("layout", "a_parameter"),
    [
        # bf16 weights, fp32 gradients; of every fourth parameter master weight, reduced gradient, two moments in fp32
        ({"ranks": 4}, 2 + 4 + (4 + 4 + 4 + 4) / 4),
        ({"dtype_bytes": 4}, 4 + 4 + 8),
        ({}, 2 + 4 + 4 + 8),
        ({"ranks": 2, "trained": 10}, 2 + (4 + 16 / 2) / 10),
        ({"dtype_bytes": 4, "ranks": 2, "states": 0}, 4 + 4 + (4 + 4) / 2),
        ({"ranks": 4, "offloads": True}, 2 + 4 + 4 / 4),
        # values and sums of a node, masters, sums and states of a rank
        ({"ranks": 4, "shard": "hybrid", "ranks_per_node": 2}, (2 + 4) / 2 + (4 + 4 + 8) / 4),
        ({"ranks": 4, "shard": "zero3", "offloads": True}, (2 + 4) / 4),
        ({"ranks": 4, "shard": "zero3", "trained": 10}, (2 + (4 + 16 - 4 - 2) / 10) / 4),
    ],
    ids=str,
)
def test_states_are_those_of_the_layout(layout, a_parameter) -> None:
    memory = StepMemory(**{"shape": LLAMA_7B, "dtype_bytes": 2, "parameters": 100, **layout})
    assert memory.state_bytes() == pytest.approx(100 * a_parameter)


def test_adapters_gather_two_layers_and_no_gradients() -> None:
    memory = StepMemory(shape=LLAMA_7B, dtype_bytes=2, ranks=64, shard="zero3", trained=1_000_000)
    layer = (LLAMA_7B.total_params - 2 * 4096 * LLAMA_7B.vocab) / 32
    assert memory.gathered_bytes() == pytest.approx(2 * 2 * layer)
    assert memory.peak_bytes(128) == memory.state_bytes() + memory.gathered_bytes() + memory.microbatch_bytes(128)


def test_the_first_stage_keeps_more_microbatches_than_the_last() -> None:
    assert LayerCut(stages=4).microbatches_kept == 4
    assert LayerCut(stages=4, virtual=3).microbatches_kept == 4 + 3 / 3
    staged = StepMemory(shape=LLAMA_7B, dtype_bytes=2, cut=LayerCut(stages=4))
    few, many = (float(staged.microbatch_bytes(10**5, kept=kept)) for kept in (1, 4))
    assert many - few == pytest.approx(3 * 10**5 * staged.saved_bytes("none"))
    assert staged.microbatch_bytes(10**5) == many


H100 = named_hardware("h100")


@given(
    shape=st.sampled_from(SHAPE_NAMES),
    kind=st.sampled_from(RECOMPUTE_KINDS),
    ranks=st.integers(1, 2000),
    stages=st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 3)]),
    device_bytes=st.floats(1e9, 1e12),
)
def test_a_capacity_fits_and_128_tokens_more_do_not(shape, kind, ranks, stages, device_bytes) -> None:
    hardware = replace(H100, device_bytes=device_bytes)
    cut = LayerCut(stages=stages[0], virtual=stages[1])
    memory, choice = step_memory(named_shape(shape), hardware, ranks, cut=cut), Choice(recompute=kind)
    room = device_bytes * (1 - RESERVED)
    try:
        tokens = recompute_capacities(memory, hardware, kinds=[kind])[kind]
    except ConfigError:
        tokens = 0
    assert tokens % 128 == 0
    assert tokens == 0 or memory.peak_bytes(tokens, choice) <= room
    assert memory.peak_bytes(tokens + 128, choice) > room


def test_capacities_of_a_7b_model() -> None:
    memory = step_memory(LLAMA_7B, H100, 64)
    found = recompute_capacities(memory, H100)
    assert found["layer"] > found["all_but_attention"] > 5 * found["none"] > 0
    assert found["all_but_attention"] > found["elementwise"] > 1.5 * found["none"]
    tight, full = (replace(H100, device_bytes=memory.peak_bytes(tokens) / 0.9) for tokens in (100, 1))
    found = recompute_capacities(memory, tight)
    assert list(found) == ["layer", "all_but_attention", "elementwise"]
    assert found["layer"] > found["all_but_attention"] > 128
    with pytest.raises(ConfigError, match="128 tokens"):
        recompute_capacities(memory, full)
    with pytest.raises(ConfigError, match="llama-70b"):
        recompute_capacities(step_memory(named_shape("llama-70b"), H100, 64), H100, kinds=["none"])


def test_fused_norms_leave_room_for_more_tokens() -> None:
    fused = replace(H100, fused_norms=True)
    plain, more = (recompute_capacities(step_memory(LLAMA_7B, each, 64), each)["none"] for each in (H100, fused))
    assert more > 1.2 * plain
    copied = all_terms_cost(LLAMA_7B, fused).copy_bytes["none"]  # norms: input and result; attention; an MLP's widths
    assert copied == 32 * (2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 11008) + 4 * 32) + 2 * 4096


def test_host_memory_is_shared_by_a_node() -> None:
    assert host_share_bytes(H100) == pytest.approx(0.9 * 2e12 / 8)
    assert all_terms_cost(LLAMA_7B, H100).host_bytes == host_share_bytes(H100)


LLAMA_8B = named_shape("llama-3.1-8b")
GB = 1e9


def memory(**changes):
    return StepMemory(**{"shape": LLAMA_8B, "dtype_bytes": 2, "ranks": 8, **changes})


def test_whole_parameters_are_taken_where_they_leave_room_and_the_reason_has_the_bytes():
    """8.03B parameters on 8 ranks: 6 + 16/8 bytes each are 64 GB whole, 16/8 are 16 GB cut, beside 3.7 gathered."""
    whole = choose_shard(memory(), 80 * GB, tokens=2048)
    assert whole.shard == "zero1"
    cut = choose_shard(memory(), 80 * GB, tokens=1 << 17)
    assert cut.shard == "zero3"
    assert "64.2 GB of 80 GB" in whole.why
    assert "19.8 GB" in cut.why
    assert choose_shard(memory(), 71 * GB, tokens=2048).shard == "zero3"
    assert choose_shard(memory(ranks=1), 180 * GB, tokens=1 << 20).shard == "zero1"
    assert choose_shard(memory(), 80 * GB, tokens=1 << 17, keeps_whole="planner packed_dp").shard == "zero1"
    assert choose_shard(memory(), None, tokens=1 << 17).shard == "zero1"


def test_hybrid_is_taken_by_several_nodes_where_a_node_holds_the_model():
    """6/8 + 16/64 bytes of each of 8.03B parameters are 8 GB, beside 3.7 gathered; of 70B a node holds too little."""
    nodes = memory(ranks=64, ranks_per_node=8)
    assert replace(nodes, shard="hybrid").state_bytes() == pytest.approx((6 / 8 + 16 / 64) * 8.03e9, rel=0.001)
    assert sum(replace(nodes, shard="hybrid").state_parts().values()) == replace(nodes, shard="hybrid").state_bytes()
    assert choose_shard(nodes, 80 * GB, tokens=2048).shard == "zero1"
    found = choose_shard(nodes, 40 * GB, tokens=2048)
    assert found.shard == "hybrid"
    large = replace(nodes, shape=named_shape("llama-3.1-70b"))
    assert choose_shard(large, 80 * GB, tokens=2048).shard == "zero3"
    assert choose_shard(replace(nodes, ranks_per_node=64), 40 * GB, tokens=2048).shard == "zero3"


def test_the_fastest_of_the_layouts_that_leave_room_is_taken_and_the_times_are_said():
    """Equally fast ones in the order zero1, hybrid, zero3; what does not fit does not count, however fast."""
    nodes, took = memory(ranks=64, ranks_per_node=8), {"zero1": 15.5, "hybrid": 15.2, "zero3": 15.0}

    def chosen(gigabytes, margin=0.0, **changes):
        seconds = {**took, **changes}
        return choose_shard(nodes, gigabytes * GB, tokens=2048, seconds=lambda laid: seconds[laid.shard], margin=margin)

    assert chosen(80).shard == "zero3"
    assert chosen(80, zero1=15.0).shard == chosen(80, margin=0.05).shard == "zero1"
    assert chosen(80, margin=0.05, zero3=14.0).shard == "zero3"
    assert chosen(80, hybrid=0.5).shard == "hybrid"
    assert chosen(40, zero1=0.5).shard == "zero3"
    assert chosen(80, zero1=inf, hybrid=inf).shard == "zero3"
    assert chosen(80, **dict.fromkeys(took, inf)).shard == "zero1"
    kept = choose_shard(nodes, 80 * GB, tokens=2048, keeps_whole="planner: static", seconds=lambda _: 1.0)
    assert kept.shard == "zero1"


def test_what_fits_in_no_way_is_refused_with_its_parts_and_what_fits():
    with pytest.raises(MemoryShortage) as caught:
        choose_shard(memory(ranks=2), 40 * GB, tokens=2048)
    said = str(caught.value)
    assert "zero1: 112 GB (weights 16.1, gradients 32.1, master weights and sums 32.1, states 32.1)" in said
    assert "8 ranks with the same memory each" in said
    assert "optimizer.offload" not in said
    with pytest.raises(MemoryShortage, match=r"Use optimizer.offload: true, or"):
        choose_shard(memory(ranks=2), 60 * GB, tokens=2048, kinds=["none"], can_offload=True)
    assert choose_shard(memory(ranks=2, offloads=True), 60 * GB, tokens=128).shard == "zero3"
    with pytest.raises(MemoryShortage, match="no planner packed_dp"):
        choose_shard(memory(), 40 * GB, tokens=2048, keeps_whole="planner packed_dp")


def test_a_rank_wants_its_share_of_the_longest_sequence_and_no_more_than_a_batch():
    assert wanted_tokens(8) == 2048
    assert wanted_tokens(8, longest=80_000) == 10_000
    assert wanted_tokens(8, longest=80, batch=200) == 200


def test_an_optimizer_on_the_host_costs_the_end_of_a_step_what_its_copies_and_its_memory_take():
    """Of a parameter in bf16 with AdamW: 4 bytes there and 2 back; 4 + 3 x 8 of the update, 4 + 2 of the cast."""
    shape, hardware = named_shape("qwen3-8b"), named_hardware("h100")
    plain, rate = all_terms_cost(shape, hardware), 300e9 / 8  # of the host's memory, a device's share
    held = StepMemory(shape=shape, dtype_bytes=2, ranks=16, offloads=True, ties=False)
    more = offloaded_cost(plain, held).step_end_seconds(16) - plain.step_end_seconds(16)
    assert more == pytest.approx(40 * shape.total_params / 16 / rate)
    adapters = offloaded_cost(plain, replace(held, trained=10**8)).step_end_seconds(16) - plain.step_end_seconds(16)
    assert adapters == pytest.approx(40 * 10**8 / 16 / rate)
    assert offloaded_cost(plain, replace(held, offloads=False)) is plain
    own = 4 * shape.total_params / 16
    assert 2**30 < own < 2**31
    assert held.host_bytes(pins=True) - held.host_bytes() == 2**31 - own, "torch pins powers of two"


def test_ranks_of_a_machine_that_do_not_divide_all_are_refused_where_hybrid_is_asked_for():
    assert [ranks_of_node(asked, 3, 8, is_asked=True) for asked in (2, 8)] == [2, 8]
    assert ranks_of_node(None, 4, 8, is_asked=True) == 4
    assert ranks_of_node(None, 3, 8, is_asked=False) is None
    with pytest.raises(ConfigError, match="divides 8 ranks; got 3, the ranks of this machine"):
        ranks_of_node(None, 3, 8, is_asked=True)


def test_an_optimizer_leaves_the_device_only_where_the_device_is_a_gpu():
    layout = ModelLayout(ranks=2, offloads=True)
    found = [memory_of(LLAMA_8B, layout, dtype_bytes=2, on_gpus=each).offloads for each in (True, False)]
    assert found == [True, False]
