"""Capacities follow the formula of a step's memory: what they allow fits, a step of tokens more does not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.core.errors import ConfigError
from lengthwise.core.plan import RECOMPUTE_KINDS
from lengthwise.cost import (
    RESERVED,
    SHAPE_NAMES,
    all_terms_cost,
    capacity_tokens,
    named_hardware,
    named_shape,
    recompute_capacities,
    step_memory,
)
from lengthwise.cost.capacity import host_share_bytes

LLAMA_7B, H100 = named_shape("llama-7b"), named_hardware("h100")


@given(
    shape=st.sampled_from(SHAPE_NAMES),
    kind=st.sampled_from(RECOMPUTE_KINDS),
    ranks=st.integers(1, 2000),
    mesh=st.sampled_from([(1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 4, 1), (2, 4, 2), (8, 8, 3)]),
    device_bytes=st.floats(1e9, 1e12),
)
def test_a_capacity_fits_and_128_tokens_more_do_not(shape, kind, ranks, mesh, device_bytes) -> None:
    tensor, stages, virtual = mesh
    hardware = replace(H100, device_bytes=device_bytes)
    memory = step_memory(named_shape(shape), hardware, ranks, tensor=tensor, stages=stages, virtual=virtual)
    room = device_bytes * (1 - RESERVED)
    try:
        tokens = capacity_tokens(memory, hardware, recompute=kind)
    except ConfigError:
        tokens = 0
    assert tokens % 128 == 0
    assert tokens == 0 or memory.peak_bytes(tokens, kind) <= room
    assert memory.peak_bytes(tokens + 128, kind) > room


def test_capacities_of_a_7b_model() -> None:
    memory = step_memory(LLAMA_7B, H100, 64)
    found = recompute_capacities(memory, H100)
    assert found["layer"] > found["all_but_attention"] > 5 * found["none"] > 0
    # four stages of four devices keep four microbatches
    staged = capacity_tokens(step_memory(LLAMA_7B, H100, 64, stages=4), H100)
    alone = capacity_tokens(replace(step_memory(LLAMA_7B, H100, 64), tensor=4), H100)
    assert staged == pytest.approx(alone / 4, rel=0.02)


def test_a_model_that_fills_the_device_is_refused() -> None:
    big = named_shape("llama-70b")
    with pytest.raises(ConfigError, match="llama-70b"):
        capacity_tokens(step_memory(big, H100, 64), H100)
    assert capacity_tokens(step_memory(big, H100, 64, tensor=4, stages=4), H100) > 0


def test_fused_norms_leave_room_for_more_tokens() -> None:
    fused = replace(H100, fused_norms=True)
    plain, more = (capacity_tokens(step_memory(LLAMA_7B, each, 64), each) for each in (H100, fused))
    assert more > 1.2 * plain
    copied = all_terms_cost(LLAMA_7B, fused).copy_bytes["none"]  # norms: input and result; attention; an MLP's widths
    assert copied == 32 * (2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 11008) + 4 * 32) + 2 * 4096


def test_host_memory_is_shared_by_a_node() -> None:
    assert host_share_bytes(H100) == pytest.approx(0.9 * 2e12 / 8)
    assert all_terms_cost(LLAMA_7B, H100, tensor=4).host_bytes == host_share_bytes(H100)
