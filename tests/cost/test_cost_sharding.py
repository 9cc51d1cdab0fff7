"""Which layout a run takes by itself, as a pure function of bytes."""

from dataclasses import replace
from math import inf

import pytest

from lengthwise.core.errors import ConfigError, MemoryShortage
from lengthwise.cost import (
    ModelLayout,
    StepMemory,
    all_terms_cost,
    choose_shard,
    memory_of,
    named_hardware,
    named_shape,
    offloaded_cost,
    ranks_of_node,
    wanted_tokens,
)

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
